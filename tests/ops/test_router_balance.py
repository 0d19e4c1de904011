"""Sums of normalised scores and counts of choices against loops; interpreted, the kernels agree with the definition."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.availability import installed
from megatron.core.ops.router_balance.reference import router_balance
from tests.ops.calls import interpreted_unlike_reference


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_the_kernels_are_close_to_the_reference_where_they_are_interpreted() -> None:
    assert interpreted_unlike_reference("router_balance") == ["[]"]


def _by_hand(score_TE: torch.Tensor, k: int, n: int, softmax: bool) -> tuple[list[list[float]], list[list[int]]]:
    experts = score_TE.shape[1]
    p_BE, count_BE = [[0.0] * experts for _ in range(n)], [[0] * experts for _ in range(n)]
    for token, row in enumerate(score_TE):
        p = (row.exp() / row.exp().sum() if softmax else row / row.sum()).tolist()
        p_BE[token % n] = [a + b for a, b in zip(p_BE[token % n], p, strict=True)]
        for e in sorted(range(experts), key=lambda e: (-p[e], e))[:k]:
            count_BE[token % n][e] += 1
    return p_BE, count_BE


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("sequences", [(1,), (5,), (1, 5, 1)])
def test_sums_are_those_of_each_sequence_for_each_number_of_sequences(softmax: bool, sequences: tuple) -> None:
    score_TE = torch.rand(20, 7, dtype=torch.float64) + 0.1
    p_BE, count_BE = router_balance(score_TE, 3, sequences, softmax)
    assert count_BE.dtype == torch.int64
    want = [_by_hand(score_TE, 3, n, softmax) for n in sequences]
    torch.testing.assert_close(p_BE, torch.tensor([row for p, _ in want for row in p], dtype=torch.float64))
    assert count_BE.tolist() == [row for _, count in want for row in count]


def test_equal_scores_count_for_the_lowest_ids() -> None:
    assert router_balance(torch.ones(6, 4), 2, (2,), False)[1].tolist() == [[3, 3, 0, 0]] * 2
    assert router_balance(torch.zeros(6, 4), 1, (1,), True)[1].tolist() == [[6, 0, 0, 0]]
