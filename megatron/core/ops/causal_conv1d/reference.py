"""The definition of ``causal_conv1d``."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from megatron.core.ops.elementwise import silu
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def causal_conv1d(x_BSC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """SiLU of the depthwise convolution with the last W positions, zeros before the first; contiguous ``[B, S, C]``."""
    length, width = x_BSC.shape[1], weight_CW.shape[1]
    padded = pad(widen(x_BSC.contiguous()), (0, 0, width - 1, 0))
    total_BSC = widen(bias_C).expand(x_BSC.shape)
    for tap, weight_C in enumerate(widen(weight_CW).unbind(1)):
        total_BSC = total_BSC + padded[:, tap : tap + length] * weight_C
    return silu(total_BSC).to(x_BSC.dtype)


VARIANT = Variant(
    name="reference",
    fn=causal_conv1d,
    guarantee={"cpu": Guarantee.BATCH, "cuda": Guarantee.BATCH},
    why="Elementwise products and sums, tap by tap; only the parameter gradients reduce, over fixed shapes.",
    sources=("megatron.core.ops.elementwise",),
)
