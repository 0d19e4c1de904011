"""``cross_entropy_grad`` a few rows at a time, so that no fp32 copy of the logits exists."""

from __future__ import annotations

import torch

from megatron.core.ops.cross_entropy_grad import reference
from megatron.core.ops.registry import Guarantee, Variant

_AT_ONCE = 1 << 20


def cross_entropy_grad(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int, log_z_T: torch.Tensor, dloss_T: torch.Tensor
) -> torch.Tensor:
    """See the reference."""
    out_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    rows = max(1, _AT_ONCE // max(1, logits_TV.shape[1]))
    for start in range(0, logits_TV.shape[0], rows):
        piece = slice(start, start + rows)
        out_TV[piece] = reference.cross_entropy_grad(
            logits_TV[piece], target_T[piece], num_valid, log_z_T[piece], dloss_T[piece]
        )
    return out_TV


VARIANT = Variant(
    name="deterministic",
    fn=cross_entropy_grad,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise.",
    sources=("megatron.core.ops.cross_entropy_grad.reference",),
)
