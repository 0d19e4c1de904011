"""The definition of ``router_topk``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def router_topk(score_TE: torch.Tensor, bias_E: torch.Tensor | None, k: int) -> torch.Tensor:
    """Ids of the ``k`` largest ``score + bias`` per token, ascending. No gradient flows.

    The sort is stable, so equal scores keep the order of their ids; NaN sorts as the largest value.

    Raises:
        ValueError: ``k`` exceeds the number of experts.
    """
    if not 0 <= k <= score_TE.shape[-1]:
        raise ValueError(f"cannot choose {k} of {score_TE.shape[-1]} experts")
    total_TE = widen(score_TE.detach())
    if bias_E is not None:
        total_TE = total_TE + widen(bias_E.detach())
    ranked_TE = torch.sort(total_TE, dim=-1, descending=True, stable=True).indices
    return torch.sort(ranked_TE[:, :k], dim=-1).values


VARIANT = Variant(
    name="reference",
    fn=router_topk,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="One addition per element, then a stable sort of each row.",
)
