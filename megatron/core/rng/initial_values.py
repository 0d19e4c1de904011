"""Initial values of a parameter, drawable again at any time: working weights are their cast, masters keep them."""

from __future__ import annotations

import torch

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.rng.counter import draw_shard


def draw_parameter(spec: ParamSpec, seed: int, out: torch.Tensor) -> None:
    """Fill ``out`` (fp32, ``spec.local_shape``, any strides) with the parameter's initial values on this rank.

    A value is a function of the seed, the parameter's global name and the element's global index, so every layout
    and every piece draws the same.
    """
    if tuple(out.shape) != spec.local_shape or out.dtype != torch.float32:
        raise ValueError(f"{spec.name}: initial values of shape {spec.local_shape} in fp32 cannot go into {out.shape}")
    for place, shard in enumerate(spec.shards):
        target = out[place : place + 1] if spec.expert else out
        draw_shard(seed, spec.name, spec.shape, shard, spec.initial, target)
