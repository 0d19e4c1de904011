"""The definition of ``cross_entropy_stats``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def cross_entropy_stats(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row maximum, sum of exp(logit - maximum) and the target's logit, over the first ``num_valid`` columns."""
    with torch.no_grad():
        wide_TV = widen(logits_TV[:, :num_valid])
        if num_valid == 0:
            nothing = wide_TV.new_zeros(wide_TV.shape[0])
            return torch.full_like(nothing, float("-inf")), nothing, nothing.clone()
        max_T = wide_TV.amax(dim=-1)
        base_T = max_T.masked_fill(max_T == float("-inf"), 0.0)
        sum_exp_T = (wide_TV - base_T.unsqueeze(-1)).exp().sum(dim=-1)
        picked_T = wide_TV.gather(-1, target_T.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return max_T, sum_exp_T, torch.where(target_T < 0, 0.0, picked_T)


VARIANT = Variant(
    name="reference",
    fn=cross_entropy_stats,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's row reductions over fixed shapes, no atomics; their order may depend on the number of rows.",
)
