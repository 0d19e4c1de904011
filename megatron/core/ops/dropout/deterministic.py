"""``dropout`` that draws its mask in pieces, so that the integers stay small, and keeps one byte per element."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.dropout.reference import check
from megatron.core.ops.philox import Key, box_mask
from megatron.core.ops.registry import Guarantee, Variant


class _Dropout(Node):
    @staticmethod
    def forward(ctx, x, keep, scale):
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.where(keep, x.float() * scale, 0.0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (keep,) = ctx.saved_tensors
        return torch.where(keep, dy.float() * ctx.scale, 0.0).to(dy.dtype), None, None


def dropout(
    x: torch.Tensor, key: Key, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], p: float
) -> torch.Tensor:
    """See the reference."""
    check(x, box, p)
    return _Dropout.apply(x, box_mask(key, shape, box, p, x.device), 1.0 / (1.0 - p))


VARIANT = Variant(
    name="deterministic",
    fn=dropout,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise; the mask comes from integer arithmetic on global indices.",
    sources=("megatron.core.ops.dropout.reference", "megatron.core.ops.philox"),
)
