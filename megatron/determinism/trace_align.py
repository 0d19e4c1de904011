"""Aligning the events of one segment in two runs, also where one run has events that the other has not."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from megatron.core.trace.format import Event

Pair = tuple[int | None, int | None]
"""Positions of one event in both runs; ``None``: the event is in the other run only."""


def align(left: Sequence[Event], right: Sequence[Event]) -> Iterator[Pair]:
    """Pairs in the order of the runs.

    Events at equal positions, counted from the front and from the back, are one event while they are the same to the
    last digest. Between them runs of events with equal signatures are matched, the longest first, so that an added
    event shifts nothing.
    """
    start, end, shorter = 0, 0, min(len(left), len(right))
    while start < shorter and same_event(left[start], right[start]):
        yield start, start
        start += 1
    while end < shorter - start and same_event(left[-1 - end], right[-1 - end]):
        end += 1
    yield from _by_signature(left, right, start, end)
    yield from ((len(left) - n, len(right) - n) for n in range(end, 0, -1))


def _by_signature(left: Sequence[Event], right: Sequence[Event], start: int, end: int) -> Iterator[Pair]:
    """Pairs of what lies between the first ``start`` and the last ``end`` events."""
    marks_left = [event.signature for event in left[start : len(left) - end]]
    marks_right = [event.signature for event in right[start : len(right) - end]]
    if marks_left == marks_right:
        yield from ((start + i, start + i) for i in range(len(marks_left)))
        return
    numbers: dict[tuple, int] = {}
    coded = [[numbers.setdefault(mark, len(numbers)) for mark in marks] for marks in (marks_left, marks_right)]
    matcher = difflib.SequenceMatcher(None, coded[0], coded[1], autojunk=False)
    for _, i0, i1, j0, j1 in matcher.get_opcodes():
        equal = coded[0][i0:i1] == coded[1][j0:j1]
        if equal:
            yield from ((start + i, start + j) for i, j in zip(range(i0, i1), range(j0, j1), strict=True))
        else:
            yield from ((start + i, None) for i in range(i0, i1))
            yield from ((None, start + j) for j in range(j0, j1))


def same_event(left: Event, right: Event) -> bool:
    """Whether two events agree in everything but their number of occurrence."""
    return left.signature == right.signature and left.ins == right.ins and left.outs == right.outs
