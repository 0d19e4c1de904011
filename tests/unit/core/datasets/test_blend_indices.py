"""Blend indices: published vectors, and every draw equal to the rule applied one draw at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from megatron.core.datasets import blend_indices
from megatron.core.datasets.blend_indices import (
    LaneSizes,
    build_blend_indices,
    build_exhaustive_indices,
    draws_by_member,
)

# Equal to the output of Megatron-Core 0.16.1.
VECTORS = [
    ((0.3, 0.7), [1, 0, 1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]),
    ((0.5, 0.3, 0.2), [0, 1, 2, 0, 1, 0, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]),
]
SMALL = LaneSizes(lanes=16, first_lanes=8, least_lanes=2, steps=24, warm_up=6)
"""Blocks of 8 and then 16 lanes: hundreds of draws cross many borders, and many guesses fail."""


def one_by_one(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None, last_of_equals: bool = False
) -> tuple[list[int], list[int]]:
    """The rule in Python's own floating point."""
    drawn = [0] * len(weights)
    members, local = [], []
    order = list(range(len(weights)))[:: -1 if last_of_equals else 1]
    for i in range(size):
        open_ = [k for k in order if limits is None or drawn[k] < limits[k]]
        member = max(open_, key=lambda k: weights[k] * max(i, 1) - drawn[k])
        members.append(member)
        local.append(drawn[member])
        drawn[member] += 1
    return members, local


def as_lists(indices: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    return indices["dataset_index"].tolist(), indices["dataset_sample_index"].tolist()


def normalized(values: np.ndarray) -> list[float]:
    return (values / values.sum()).tolist()


def random_weights(generator: np.random.Generator, kind: str, members: int) -> list[float]:
    drawn = {
        "uniform": lambda: generator.random(members) + 1e-6,
        "skewed": lambda: generator.dirichlet(np.full(members, 0.3)) + 1e-12,
        "tiny": lambda: 10.0 ** generator.uniform(-9, 0, members),
        "equal": lambda: np.ones(members),
        "tied": lambda: generator.integers(1, 4, members).astype(float),
    }
    return normalized(drawn[kind]())


@pytest.mark.parametrize(("weights", "members", "local"), VECTORS)
@pytest.mark.parametrize("sizes", [None, LaneSizes(lanes=2, first_lanes=2, least_lanes=1, steps=2, warm_up=1)])
def test_published_vectors(weights, members, local, sizes):
    indices = build_blend_indices(weights, 10, sizes)
    assert as_lists(indices) == (members, local)
    assert [a.dtype for a in indices.values()] == [np.int16, np.int64]


@pytest.mark.parametrize("kind", ["uniform", "skewed", "tiny", "equal", "tied"])
def test_every_draw_is_the_rules(kind: str):
    generator = np.random.default_rng(0)
    for members in (1, 2, 3, 5, 12, 20):
        weights, size = random_weights(generator, kind, members), int(generator.integers(600, 1200))
        assert as_lists(build_blend_indices(weights, size, SMALL)) == one_by_one(weights, size), (weights, size)


@pytest.mark.parametrize("kind", ["uniform", "equal"])
def test_two_hundred_data_sets(kind: str):
    weights = random_weights(np.random.default_rng(1), kind, 200)
    assert as_lists(build_blend_indices(weights, 2000, SMALL)) == one_by_one(weights, 2000)


def test_any_size_around_the_borders_of_lanes_and_blocks():
    weights, first = [0.11, 0.23, 0.5, 0.16], 1 + SMALL.steps * SMALL.first_lanes
    second = first + SMALL.steps * SMALL.lanes
    members, local = one_by_one(weights, second + 30)
    borders = [0, 1, 2, 1 + SMALL.steps, 1 + 2 * SMALL.steps, first, first + SMALL.steps, second]
    for size in {max(0, border + step) for border in borders for step in (-1, 0, 1)}:
        assert as_lists(build_blend_indices(weights, size, SMALL)) == (members[:size], local[:size]), size


def test_the_sizes_used_give_the_same_draws():
    weights = random_weights(np.random.default_rng(2), "skewed", 6)
    assert as_lists(build_blend_indices(weights, 40_000)) == one_by_one(weights, 40_000)


def test_exhaustive_draws_every_sample_once():
    counts = [7, 1, 13]
    members, local = as_lists(build_exhaustive_indices(counts))
    assert sorted(zip(members, local, strict=True)) == [(m, i) for m, size in enumerate(counts) for i in range(size)]


def test_exhaustive_draws_are_the_rules_with_spent_members_left_out():
    generator = np.random.default_rng(3)
    for most in (3, 40, 400):
        for members in (1, 2, 7):
            counts = generator.integers(1, most, members).tolist()
            weights = (np.array(counts) / np.float64(sum(counts))).tolist()
            assert as_lists(build_exhaustive_indices(counts, SMALL)) == one_by_one(weights, sum(counts), counts), counts


def test_a_wrong_tie_rule_is_seen():
    weights = normalized(np.ones(3))
    assert as_lists(build_blend_indices(weights, 300, SMALL)) == one_by_one(weights, 300)
    assert as_lists(build_blend_indices(weights, 300, SMALL)) != one_by_one(weights, 300, last_of_equals=True)


def test_wrong_guesses_cost_time_and_change_nothing(monkeypatch: pytest.MonkeyPatch):
    def wrong(shares: np.ndarray, limits: object, positions: np.ndarray, *rest: object) -> np.ndarray:
        counts = np.zeros((len(positions), len(shares)))
        counts[:, 0] = positions
        return counts

    monkeypatch.setattr(blend_indices, "_guesses", wrong)
    weights = [0.3, 0.3, 0.4]
    assert as_lists(build_blend_indices(weights, 1000, SMALL)) == one_by_one(weights, 1000)


def test_most_draws_are_made_side_by_side(monkeypatch: pytest.MonkeyPatch):
    """What the time is made of: steps of all lanes together, each about as long as one draw by itself."""
    made, original = [], blend_indices._run

    def run(shares: object, limits: object, due: np.ndarray, drawn: object, steps: int, *out: object) -> None:
        made.append(steps)
        original(shares, limits, due, drawn, steps, *out)

    monkeypatch.setattr(blend_indices, "_run", run)
    size = 1_000_000
    build_blend_indices(random_weights(np.random.default_rng(4), "uniform", 20), size)
    assert sum(made) < size / 50


def test_counts_are_added_up_over_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blend_indices, "_COUNT_BLOCK", 7)
    assert draws_by_member(build_blend_indices((0.3, 0.7), 100)["dataset_index"], 3).tolist() == [30, 70, 0]


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    build_blend_indices((0.3, 0.7), 1000, SMALL)
    assert not caplog.records
    monkeypatch.setattr(blend_indices, "_WORTH_A_WORD", 1000)
    with caplog.at_level(logging.WARNING):
        build_blend_indices((0.3, 0.7), 1000, SMALL)
    assert caplog.messages[-1] == "blend of 2 data sets: 1000 of 1000 samples assigned"
    assert 2 <= len(caplog.messages) <= 12
