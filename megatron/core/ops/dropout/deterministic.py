"""``dropout`` that draws its mask in pieces, and again in the backward instead of keeping it."""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from megatron.core.ops.dropout.reference import check
from megatron.core.ops.philox import Key, box_index, keep_mask
from megatron.core.ops.registry import Guarantee, Variant

_AT_ONCE = 1 << 20


def masked(
    x: torch.Tensor, key: Key, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], p: float
) -> torch.Tensor:
    """``x / (1 - p)`` where kept, +0.0 elsewhere, a few rows of the first dimension at a time."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, last), *rest = box
    rows = max(1, _AT_ONCE // max(1, math.prod(stop - start for start, stop in rest)))
    for start in range(first, last, rows):
        stop = min(last, start + rows)
        keep = keep_mask(key, box_index(shape, ((start, stop), *rest), x.device), p)
        piece = slice(start - first, stop - first)
        out[piece] = torch.where(keep, x[piece].float() * (1.0 / (1.0 - p)), 0.0)
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key, shape, box, p):
        ctx.drawn = key, shape, box, p
        return masked(x, key, shape, box, p)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return masked(dy, *ctx.drawn), None, None, None, None


def dropout(
    x: torch.Tensor, key: Key, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], p: float
) -> torch.Tensor:
    """See the reference."""
    check(x, box, p)
    return _Dropout.apply(x, key, shape, box, p)


VARIANT = Variant(
    name="deterministic",
    fn=dropout,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise; the mask comes from integer arithmetic on global indices.",
    sources=("megatron.core.ops.dropout.reference", "megatron.core.ops.philox"),
)
