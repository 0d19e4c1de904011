"""The definition of ``gated_rms_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.elementwise import silu
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def gated_rms_norm(
    y_BSX: torch.Tensor, z_BSX: torch.Tensor, weight_X: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    """Gate first, then normalise each group of ``group_size`` channels; in the type of ``y_BSX``."""
    gated = (widen(y_BSX) * silu(widen(z_BSX))).unflatten(-1, (-1, group_size))
    mean_square = gated.square().mean(dim=-1, keepdim=True)
    normal_BSX = (gated * torch.rsqrt(mean_square + eps)).flatten(-2)
    return (normal_BSX * widen(weight_X)).to(y_BSX.dtype)


VARIANT = Variant(
    name="reference",
    fn=gated_rms_norm,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's reductions over fixed shapes, no atomics; their order may depend on the number of rows.",
    sources=("megatron.core.ops.elementwise",),
)
