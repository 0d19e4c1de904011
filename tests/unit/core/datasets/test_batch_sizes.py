"""The batch size by consumed samples: against a step by step walk, and its two spellings."""

from __future__ import annotations

import pytest

from megatron.core.datasets.batch_sizes import BatchSizes, parse_schedule, ramp_up

SCHEDULES = [
    BatchSizes(((0, 8),)),
    BatchSizes(((0, 4), (10, 8))),
    BatchSizes(((0, 4), (12, 8), (36, 16))),
    BatchSizes(((0, 16), (3, 2), (5, 4), (100, 1))),  # a step may jump over an entry
    ramp_up(2, 2, 30, 8),
]


def walk(sizes: BatchSizes, steps: int) -> list[int]:
    """Consumed samples after each step."""
    found = [0]
    for _ in range(steps):
        found.append(found[-1] + next(size for first, size in reversed(sizes.steps) if first <= found[-1]))
    return found


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_closed_forms_equal_the_walk(sizes: BatchSizes) -> None:
    consumed = walk(sizes, 60)
    for done in range(20):
        for more in range(40):
            assert sizes.after(consumed[done], more) == consumed[done + more]
    for samples in range(consumed[40]):
        assert sizes.iterations(samples) == sum(c <= samples for c in consumed) - 1


def test_schedule_in_tokens() -> None:
    sizes = parse_schedule("0:768 250B:1536 1.5T:8".replace("1.5T", "1500B"), 8192)
    assert sizes.steps == ((0, 768), (250 * 10**9 // 8192, 1536), (1500 * 10**9 // 8192, 8))
    assert parse_schedule("0:2 3k:4", 1000).steps == ((0, 2), (3, 4))
    assert (sizes.at(0), sizes.at(250 * 10**9 // 8192 - 1), sizes.at(250 * 10**9 // 8192), sizes.last) == (
        768,
        768,
        1536,
        8,
    )


@pytest.mark.parametrize(
    "text",
    ["", "5:2", "0:2 x:4", "0:2 4", "0:0", "0:2 9:4 9:8", "0:2 9:4 8:8", "0:-2", "0:2 1:4", f"0:2 {'9' * 5000}T:4"],
)
def test_schedule_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="THRESHOLD|0|ascend"):
        parse_schedule(text, 4)


def test_ramp_up() -> None:
    assert ramp_up(2, 2, 30, 8).steps == ((0, 2), (10, 4), (20, 6), (30, 8))
    assert ramp_up(2, 3, 10, 11).steps == ((0, 2), (4, 5), (7, 8), (10, 11))
    for wrong in ((0, 2, 30, 8), (2, 4, 30, 8), (8, 2, 30, 8), (2, 0, 30, 8), (2, 2, 0, 8)):
        with pytest.raises(ValueError, match="do not lead"):
            ramp_up(*wrong)
