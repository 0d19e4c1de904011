"""Creating parameters: specs of the usual cuts, and working weights filled with their initial values."""

from __future__ import annotations

from typing import Literal

import torch

from megatron.core.contracts.param_spec import Initial, ParamSpec, cut_shard, replicated_shard
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.rng.initial_values import draw_parameter
from megatron.core.tensor_parallel.context import ModelContext

Stages = tuple[Literal["first", "last"], ...]


def replicated_spec(
    name: str,
    shape: tuple[int, ...],
    initial: Initial,
    context: ModelContext,
    *,
    weight_decay: bool | None = None,
    partial: bool = False,
) -> ParamSpec:
    """Spec of a parameter that every tensor-parallel rank holds whole.

    It reads activations that are cut along the sequence under sequence parallelism, so its gradients are partial
    there; ``partial`` says that they always are. Vectors do not decay unless told to.
    """
    return ParamSpec(
        name=name,
        shape=shape,
        num_shards=1,
        shards=(replicated_shard(shape),),
        initial=initial,
        tp_replicated=True,
        tp_partial=partial or context.cuts_sequence,
        weight_decay=len(shape) > 1 if weight_decay is None else weight_decay,
    )


def cut_spec(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    initial: Initial,
    context: ModelContext,
    *,
    parts: tuple[int, ...] | None = None,
    fp32: bool = False,
    weight_decay: bool | None = None,
    stages: Stages = (),
) -> ParamSpec:
    """Spec of a parameter cut along ``dim`` over the tensor-parallel ranks; with ``parts`` every part is cut by
    itself. Vectors do not decay unless told to.

    Raises:
        ValueError: the tensor-parallel size does not divide the dimension or a part.
    """
    tp = context.groups.tp
    return ParamSpec(
        name=name,
        shape=shape,
        num_shards=tp.size,
        shards=(cut_shard(shape, dim, tp.rank, tp.size, parts),),
        initial=initial,
        fp32=fp32,
        weight_decay=len(shape) > 1 if weight_decay is None else weight_decay,
        stages=stages,
    )


def create_parameter(spec: ParamSpec, context: ModelContext) -> ModelParameter:
    """A working weight on this rank's device: the fp32 initial values rounded once to the working type.

    On the meta device, which holds shapes alone, nothing is drawn.
    """
    dtype = torch.float32 if spec.fp32 else context.params_dtype
    data = torch.empty(spec.local_shape, dtype=dtype, device=context.groups.device)
    if data.device.type != "meta":
        draw_parameter(spec, context.seed, data)
    return ModelParameter(data, spec)
