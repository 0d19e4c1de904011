"""The definition of ``router_balance``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_table.reference import router_table
from megatron.core.ops.router_topk.reference import router_topk


def router_balance(
    score_TE: torch.Tensor, k: int, sequences: tuple[int, ...], softmax: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens of each sequence: of normalised scores, ``p_BE``, and of choices, ``count_BE`` (int64).

    Tokens are in (s, b) order. ``sequences`` says into how many sequences they are cut, once for each set of rows of
    the results; every number divides the largest of them, which divides that of the tokens. Scores are normalised by
    softmax, or by their sum + 1e-20; a choice is one of the ``k`` largest normalised scores of a token, of equal ones
    the lowest id.
    """
    x_TE = widen(score_TE)
    tokens, experts = x_TE.shape
    p_TE = torch.softmax(x_TE, dim=-1) if softmax else x_TE / (x_TE.sum(dim=-1, keepdim=True) + 1e-20)
    chosen_TE = router_table(router_topk(p_TE, None, k), experts)
    p = [p_TE.view(tokens // n, n, experts).sum(dim=0) for n in sequences]
    count = [chosen_TE.view(tokens // n, n, experts).sum(dim=0) for n in sequences]
    return (p[0], count[0]) if len(sequences) == 1 else (torch.cat(p), torch.cat(count))


VARIANT = Variant(
    name="reference",
    fn=router_balance,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's sums over fixed shapes, no atomics; choices are counted as integers.",
    sources=("megatron.core.ops.router_table.reference", "megatron.core.ops.router_topk.reference"),
)
