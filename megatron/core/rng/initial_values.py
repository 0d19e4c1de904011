"""Initial values of a parameter, drawable again at any time: working weights are their cast, masters keep them."""

from __future__ import annotations

import torch

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.rng.counter import draw_shard


def draw_parameter(spec: ParamSpec, seed: int, out: torch.Tensor) -> None:
    """Fill ``out`` (``spec.local_shape``, contiguous) with the parameter's initial values on this rank: fp32, or
    rounded once to the type of ``out``. Nothing of the parameter's size is made beside it.

    A value is a function of the seed, the parameter's global name and the element's global index, so every layout
    and every piece draws the same.

    Raises:
        ValueError: ``out`` has another shape.
    """
    if tuple(out.shape) != spec.local_shape:
        raise ValueError(f"{spec.name}: initial values of shape {spec.local_shape} cannot go into {tuple(out.shape)}")
    for place, shard in enumerate(spec.shards):
        draw_shard(spec, shard, seed, out[place] if spec.expert else out)
