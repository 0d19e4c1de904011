"""The definition of ``rms_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def rms_norm(x_SBH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), in the type of ``x_SBH``."""
    wide_SBH = widen(x_SBH)
    mean_square = wide_SBH.square().mean(dim=-1, keepdim=True)
    return (wide_SBH * torch.rsqrt(mean_square + eps) * widen(weight_H)).to(x_SBH.dtype)


VARIANT = Variant(
    name="reference",
    fn=rms_norm,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's reductions over fixed shapes, no atomics; their order may depend on the number of rows.",
)
