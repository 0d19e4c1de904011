"""The definition of ``layer_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def layer_norm(x_SBH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension (Ba et al., arXiv 1607.06450), biased variance, in the type of ``x_SBH``."""
    wide_SBH = widen(x_SBH)
    centred_SBH = wide_SBH - wide_SBH.mean(dim=-1, keepdim=True)
    variance = centred_SBH.square().mean(dim=-1, keepdim=True)
    normal_SBH = centred_SBH * torch.rsqrt(variance + eps)
    return (normal_SBH * widen(weight_H) + widen(bias_H)).to(x_SBH.dtype)


VARIANT = Variant(
    name="reference",
    fn=layer_norm,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's reductions over fixed shapes, no atomics; their order may depend on the number of rows.",
)
