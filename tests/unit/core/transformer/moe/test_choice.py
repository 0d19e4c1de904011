"""Limits on the choice of experts: groups, forced balance, capacity."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.router_table.reference import router_table
from megatron.core.ops.router_topk.reference import router_topk
from megatron.core.transformer.moe.choice import (
    choose_in_groups,
    expert_capacity,
    forced_ids,
    runs_of_experts,
    within_capacity,
)


@pytest.mark.parametrize(("k", "groups", "best"), [(4, 4, 2), (2, 2, 1), (6, 3, 3), (3, 4, 3)])
def test_choices_lie_in_the_best_groups(k: int, groups: int, best: int) -> None:
    score = torch.randn(50, 12)
    ids = choose_in_groups(score, k, groups, best, router_topk, router_table)
    for row, chosen in zip(score, ids.tolist(), strict=True):
        worth = [part.sort(descending=True).values[: k // best].sum().item() for part in row.view(groups, -1)]
        allowed = sorted(range(groups), key=lambda g: -worth[g])[:best]
        experts = [e for e in range(12) if e // (12 // groups) in allowed]
        assert chosen == sorted(sorted(experts, key=lambda e: -row[e].item())[:k])


def test_equal_scores_take_the_lowest_groups_and_experts() -> None:
    assert choose_in_groups(torch.zeros(3, 8), 4, 4, 2, router_topk, router_table).tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (4, 4), (6, 1), (5, 3), (1, 1)])
def test_forced_choices_are_balanced_and_a_function_of_the_token(experts: int, k: int) -> None:
    tokens, runs = 5 * experts, runs_of_experts(experts, k, torch.device("cpu"))
    ids = forced_ids(runs, 0, tokens, 3)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [sorted((3 + k * t + j) % experts for j in range(k)) for t in range(tokens)]
    assert torch.bincount(ids.flatten(), minlength=experts).tolist() == [5 * k] * experts
    assert all(len(set(row)) == k for row in ids.tolist())
    half = tokens // 2
    assert torch.equal(torch.cat([forced_ids(runs, 0, half, 3), forced_ids(runs, half, tokens - half, 3)]), ids)
    assert forced_ids(runs, half, 0, 3).shape == (0, k)
    assert not torch.equal(forced_ids(runs, 0, tokens, 4), ids) or k == experts


def test_capacity_is_a_share_rounded_up() -> None:
    assert expert_capacity(64, 2, 8, 1.0) == 16
    assert expert_capacity(64, 2, 8, 1.01) == 17
    assert expert_capacity(4, 2, 2, 10.0) == 4


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_experts_keep_the_best_or_the_first(policy: str, capacity: int) -> None:
    ids = torch.rand(30, 6).argsort(dim=1)[:, :2].sort(dim=1).values
    weight = torch.rand(30, 2).mul(4).round().div(4)  # with many equal ones
    kept = within_capacity(ids, weight, router_table(ids, 6), capacity, policy)
    for expert in range(6):
        mine = [(t, j) for t in range(30) for j in range(2) if ids[t, j] == expert]
        if policy == "probs":
            mine.sort(key=lambda place: (-weight[place].item(), place[0]))
        assert [place for place in mine if kept[place]] == mine[:capacity]
