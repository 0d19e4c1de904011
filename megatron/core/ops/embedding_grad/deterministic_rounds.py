"""``embedding_grad`` in rounds: round r adds the (r + 1)-th token of every id."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def embedding_grad(main_grad_VH: torch.Tensor, dy_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
    """See the reference. As many rounds as the most frequent id has tokens; waits once for their sizes."""
    with torch.no_grad():
        inside = ((ids_T >= 0) & (ids_T < main_grad_VH.shape[0])).nonzero().squeeze(1)
        if not inside.numel():
            return
        ids, order = torch.sort(ids_T[inside], stable=True)
        at = torch.arange(ids.numel(), device=ids.device)
        starts = torch.cat((ids.new_ones(1, dtype=torch.bool), ids[1:] != ids[:-1]))
        rank = at - torch.where(starts, at, 0).cummax(dim=0).values
        by_round = torch.sort(rank, stable=True).indices
        ids, token = ids[by_round], inside[order[by_round]]
        for rows, tokens in zip(*(t.split(_round_sizes(rank)) for t in (ids, token)), strict=True):
            # Ids are distinct within a round.
            main_grad_VH[rows] = main_grad_VH[rows] + dy_TH[tokens].float()


def _round_sizes(rank: torch.Tensor) -> list[int]:
    return torch.bincount(rank).tolist()


VARIANT = Variant(
    name="deterministic_rounds",
    fn=embedding_grad,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Stable sorts; in each round at most one elementwise fp32 addition per row, rounds in order of positions.",
)
