"""Which experts are chosen when scores tie, and that strange scores do no harm."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.ops.router_topk.reference import router_topk


def _by_hand(row: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda e: (-row[e], e))[:k])


def test_ties_go_to_the_lowest_id():
    score_TE = torch.randint(0, 4, (200, 11), generator=torch.Generator().manual_seed(1)).float()
    for k in (1, 3, 11):
        assert router_topk(score_TE, None, k).tolist() == [_by_hand(row, k) for row in score_TE.tolist()]


def test_the_bias_changes_the_choice():
    score_TE = torch.zeros(2, 6)
    bias_E = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.25, 0.0])
    assert router_topk(score_TE, bias_E, 3).tolist() == [[0, 2, 4]] * 2


def test_signed_zeros_tie_and_nan_comes_first():
    assert router_topk(torch.tensor([[-0.0, 0.0, -0.0]]), None, 2).tolist() == [[0, 1]]
    assert router_topk(torch.tensor([[math.inf, 1.0, math.nan, 2.0]]), None, 2).tolist() == [[0, 2]]
    assert router_topk(torch.full((1, 4), math.nan), None, 2).tolist() == [[0, 1]]


def test_no_gradient_flows_and_k_is_checked():
    score_TE = torch.rand(3, 4, requires_grad=True)
    assert not router_topk(score_TE, None, 2).requires_grad
    with pytest.raises(ValueError, match="choose 5 of 4"):
        router_topk(score_TE, None, 5)
