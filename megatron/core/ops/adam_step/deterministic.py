"""``adam_step`` in pieces that stay in the cache, with temporaries of one piece."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_step import reference
from megatron.core.ops.adam_step.scalars import AdamScalars
from megatron.core.ops.registry import Guarantee, Variant

_PIECE = {"cpu": 1 << 15, "cuda": 1 << 26}


def adam_step(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: AdamScalars
) -> None:
    """See the reference; the bits are the same because every operation is elementwise."""
    size = _PIECE[param.device.type]
    pieces = (t.split(size) for t in (param, grad, exp_avg, exp_avg_sq))
    for p, g, mean, square in zip(*pieces, strict=True):
        reference.adam_step(p, g, mean, square, scalars)


VARIANT = Variant(
    name="deterministic",
    fn=adam_step,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other.",
    sources=("megatron.core.ops.adam_step.reference", "megatron.core.ops.adam_step.scalars"),
)
