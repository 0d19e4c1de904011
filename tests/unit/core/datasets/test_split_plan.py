"""Plans of splits: sizes of blends at any scale, and the reason for every split that has no data."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.split_plan import Absent, SplitPlan, plan_split


class Lengths:
    """A source of which only the lengths are looked at: planning reads no token."""

    def __init__(self, name: str, lengths) -> None:
        self.name, self.path = name, name
        self.sequence_lengths = np.array(lengths, np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None):
        pytest.fail("planning read tokens")

    def document_of(self, sequence: int) -> int:
        return sequence

    def content_digest(self) -> str:
        return self.name


def _plan(sources, weights=None, size=10, bookends=(0.0, 1.0), s=4, surplus=0.005):
    return plan_split(sources, weights, bookends=bookends, size=size, sequence_length=s, surplus=surplus)


def test_one_source_is_asked_for_everything():
    plan = _plan([Lengths("a", [10] * 20)], bookends=(0.5, 1.0), size=60)
    assert isinstance(plan, SplitPlan) and plan.weights is None
    (member,) = plan.members
    assert (member.first, member.stop, member.request) == (10, 20, 60)
    assert (member.samples.num_epochs, member.samples.num_samples) == (3, 74)


def test_weighted_members_get_their_share_and_a_surplus():
    sources = [Lengths("a", [100] * 1000), Lengths("b", [100] * 1000)]
    plan = _plan(sources, (1, 3), size=100_000)
    assert isinstance(plan, SplitPlan)
    assert [m.request for m in plan.members] == [25_125, 75_375]
    assert (plan.weights, plan.size) == ((0.25, 0.75), 100_000)


def test_unweighted_members_count_by_their_samples():
    sources = [Lengths("a", [41]), Lengths("empty", []), Lengths("short", [4]), Lengths("b", [121])]
    plan = _plan(sources, size=20)
    assert isinstance(plan, SplitPlan)
    assert [m.source.name for m in plan.members] == ["a", "b"]
    assert (plan.weights, plan.size) == ((0.25, 0.75), 20)
    assert _plan(sources, size=500).size == 40
    exhaustive = _plan(sources, size=None)
    assert (exhaustive.weights, exhaustive.size) == ((10, 30), None)


@pytest.mark.parametrize(
    ("sources", "options", "reason", "chosen"),
    [
        ([Lengths("a", [9])], {"size": 0}, "no samples were asked for", True),
        ([Lengths("a", [])], {}, "a: its share 0..1 of 0 sequences is sequences 0..0, which hold no tokens", False),
        ([Lengths("a", [0, 0])], {}, "sequences 0..2, which hold no tokens", False),
        ([Lengths("a", [9])], {"bookends": (0.9, 1.0)}, "share 0.9..1 of 1 sequences is sequences 1..1", False),
        ([Lengths("a", [4])], {"size": None}, "which hold 4 tokens; one sample needs 5", False),
        ([Lengths("a", [9]), Lengths("b", [])], {"weights": (1, 1)}, "b: its share", False),
        ([Lengths("a", [9])], {"weights": (1,), "size": None}, "needs a number of samples", False),
        ([Lengths("a", []), Lengths("b", [])], {}, "a: .*; b: ", False),
    ],
)
def test_absent(sources, options, reason, chosen):
    plan = _plan(sources, **options)
    assert isinstance(plan, Absent)
    assert plan.chosen == chosen
    for part in reason.split(".*"):
        assert part in plan.reason


def test_a_few_tokens_are_enough_for_any_number_of_samples():
    plan = _plan([Lengths("a", [1])], size=3)
    assert plan.members[0].samples.num_epochs == 13
