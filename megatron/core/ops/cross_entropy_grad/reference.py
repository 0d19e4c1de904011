"""The definition of ``cross_entropy_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def cross_entropy_grad(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int, log_z_T: torch.Tensor, dloss_T: torch.Tensor
) -> torch.Tensor:
    """Probability minus one-hot target, times the token's loss gradient; in the type of the logits."""
    with torch.no_grad():
        column_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
        difference_TV = (widen(logits_TV) - widen(log_z_T).unsqueeze(-1)).exp_()
        difference_TV -= (column_V == target_T.unsqueeze(-1)).to(difference_TV.dtype)
        difference_TV *= widen(dloss_T).unsqueeze(-1)
        return difference_TV.masked_fill_(column_V >= num_valid, 0.0).to(logits_TV.dtype)


VARIANT = Variant(
    name="reference",
    fn=cross_entropy_grad,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise.",
)
