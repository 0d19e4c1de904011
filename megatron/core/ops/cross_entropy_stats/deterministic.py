"""``cross_entropy_stats`` a few rows at a time, so that no fp32 copy of the logits exists."""

from __future__ import annotations

import torch

from megatron.core.ops.cross_entropy_stats import reference
from megatron.core.ops.registry import Guarantee, Variant

_AT_ONCE = 1 << 20


def cross_entropy_stats(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference."""
    out = tuple(logits_TV.new_empty(logits_TV.shape[0], dtype=torch.float32) for _ in range(3))
    rows = max(1, _AT_ONCE // max(1, logits_TV.shape[1]))
    for start in range(0, logits_TV.shape[0], rows):
        piece = slice(start, start + rows)
        found = reference.cross_entropy_stats(logits_TV[piece].contiguous(), target_T[piece], num_valid)
        for whole, part in zip(out, found, strict=True):
            whole[piece] = part
    return out


VARIANT = Variant(
    name="deterministic",
    fn=cross_entropy_stats,
    guarantee={"cpu": Guarantee.BATCH, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's row reductions, pieces of fixed size; on the CPU a row's sum does not depend on the other rows.",
    sources=("megatron.core.ops.cross_entropy_stats.reference",),
)
