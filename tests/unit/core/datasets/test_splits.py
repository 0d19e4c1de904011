"""Splits: shares, borders with Python's rounding, sizes, and texts that are refused."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.splits import parse_split, requested_sizes, sequence_range, split_matrix


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969, 30, 1", [0.969, 0.03, 0.001]),
        ("99,1", [0.99, 0.01, 0.0]),
        ("1", [1.0, 0.0, 0.0]),
        ("8/1/1", [0.8, 0.1, 0.1]),
        ("0,.5,.5", [0.0, 0.5, 0.5]),
    ],
)
def test_shares(text, shares):
    assert parse_split(text) == shares


@pytest.mark.parametrize("text", ["9" * 400, "", "a,b", "1,2,3,4", "0,0,0", "1.2.3", "-1,2,3"])
def test_refused(text):
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)


def test_borders():
    assert split_matrix([0.99, 0.01, 0.0]) == [(0, 0.99), (0.99, 1.0), None]
    assert split_matrix([0.0, 1.0, 0.0]) == [None, (0.0, 1.0), None]
    matrix = split_matrix(parse_split("1,1,1"))
    assert [sequence_range(b, 100_000) for b in matrix] == [(0, 33333), (33333, 66667), (66667, 100000)]


def test_ties_round_to_even():
    assert sequence_range((0.5, 1.0), 5) == (2, 5)
    assert sequence_range((0.5, 1.0), 7) == (4, 7)


def test_requested_sizes():
    common = {"train_samples": 800, "train_iters": 100, "eval_iters": 5, "global_batch_size": 8}
    assert requested_sizes(**common, eval_interval=30) == (800, (100 // 30 + 1) * 40, 40)
    assert requested_sizes(**common, eval_interval=None) == (800, 0, 40)
