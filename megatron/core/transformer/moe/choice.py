"""Which experts a token may be routed to: limits by group of experts, forced balance, and capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

TopK = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]
Table = Callable[[torch.Tensor, int], torch.Tensor]


def choose_in_groups(
    score_TE: torch.Tensor, k: int, num_groups: int, group_topk: int, topk: TopK, table: Table
) -> torch.Tensor:
    """Ids ``[T, k]`` of the k best experts inside the ``group_topk`` best groups, ascending.

    Experts are in ``num_groups`` consecutive groups; the score of a group is the sum of its k / group_topk best ones.
    Ties go to the lowest group and the lowest expert. ``topk`` and ``table`` are the ops ``router_topk`` and
    ``router_table``.
    """
    tokens, experts = score_TE.shape
    grouped = score_TE.view(tokens * num_groups, experts // num_groups)
    best = grouped.gather(1, topk(grouped, None, k // group_topk))
    worth_TG = best.sum(dim=-1).view(tokens, num_groups)
    allowed_TG = table(topk(worth_TG, None, group_topk), num_groups)
    allowed_TE = allowed_TG.repeat_interleave(experts // num_groups, dim=1)
    return topk(score_TE.masked_fill(~allowed_TE, -math.inf), None, k)


def runs_of_experts(num_experts: int, k: int, device: torch.device) -> torch.Tensor:
    """``[E, k]``: in row e the ``k`` experts from e on, modulo their number, ascending."""
    first_E1 = torch.arange(num_experts, device=device).unsqueeze(1)
    return ((first_E1 + torch.arange(k, device=device)) % num_experts).sort(dim=1).values


def forced_ids(runs_Ek: torch.Tensor, first: int, tokens: int, offset: int) -> torch.Tensor:
    """Ids ``[tokens, k]``, ascending, that cycle through the experts: token t of a micro-batch gets the k experts from
    ``offset + k t`` on, modulo their number. ``first`` is the number of the first token here. Every expert gets equally
    many tokens where E divides k times their number, and never two more than another.

    ``runs_Ek`` is ``runs_of_experts``. Ids are not cached between calls: a trace would show which calls hit the cache.
    """
    num_experts, k = runs_Ek.shape
    start = offset + k * first
    start_T = torch.arange(start, start + k * tokens, k, device=runs_Ek.device)
    return runs_Ek.index_select(0, start_T.remainder_(num_experts))


def expert_capacity(tokens: int, k: int, num_experts: int, factor: float) -> int:
    """Tokens of ``tokens`` that one expert takes: ceil(tokens k / E * factor), and never more than there are."""
    return min(tokens, math.ceil(tokens * k / num_experts * factor))


def within_capacity(
    ids_Tk: torch.Tensor,
    weight_Tk: torch.Tensor,
    chosen_TE: torch.Tensor,
    capacity: int,
    policy: Literal["probs", "position"],
) -> torch.Tensor:
    """Boolean ``[T, k]``: which choices an expert that takes ``capacity`` tokens keeps: those with the largest weight
    (equal ones: the earlier token), or the earliest tokens. ``chosen_TE`` is the table of all choices."""
    if policy == "position":
        place_TE = chosen_TE.cumsum(dim=0) - 1
    else:
        worth_TE = weight_Tk.new_full(chosen_TE.shape, -math.inf).scatter_(1, ids_Tk, weight_Tk)
        order_TE = torch.sort(worth_TE, dim=0, descending=True, stable=True).indices
        steps_TE = torch.arange(ids_Tk.shape[0], device=ids_Tk.device).unsqueeze(1).expand_as(order_TE)
        place_TE = torch.empty_like(order_TE).scatter_(0, order_TE, steps_TE)
    return place_TE.gather(1, ids_Tk) < capacity
