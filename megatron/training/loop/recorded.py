"""Two recordings of one computation on one rank: where they first differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.trace.format import Event, Seen, decode_event

RECEIVING = ("collective", "sum")
"""Kinds of events whose results other ranks have a part in."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference. ``received``: this rank gave the same to a transfer, and something else arrived."""

    what: str
    received: bool


@dataclass(frozen=True, slots=True)
class _Placed:
    """An event and the part of the step it belongs to."""

    segment: tuple[tuple[str, int | str], ...]
    event: Event

    def __str__(self) -> str:
        event = self.event
        coordinates = [f"{key} {value}" for key, value in self.segment if key not in ("pass", "iteration")]
        return f"{event.name} of {event.scope or 'the step'} ({', '.join([event.phase, *coordinates])})"


def first_mismatch(first: bytes, second: bytes) -> Mismatch | None:
    """The first event, in the order of the first recording, that differs in the second."""
    if first == second:
        return None
    others = dict(_identified(second))
    for identity, mine in _identified(first):
        other = others.pop(identity, None)
        if other is None:
            return Mismatch(f"{mine}, which happened in one computation only", received=False)
        what = _difference(mine.event, other.event)
        if what is not None:
            label, given = what
            return Mismatch(f"{label} in {mine}", received=not given and mine.event.kind in RECEIVING)
    extra = next(iter(others.values()), None)
    if extra is None:
        return None  # nothing but names of transfers, which count on where another probe listens
    return Mismatch(f"{extra}, which happened in one computation only", received=False)


def _identified(lines: bytes) -> Iterator[tuple[tuple, _Placed]]:
    """Events by segment, kind, scope, name, phase and how often that occurred so far."""
    segment: tuple[tuple[str, int | str], ...] = ()
    seen: Counter[tuple] = Counter()
    for line in lines.splitlines():
        if not line.startswith(b'{"e"'):
            segment = tuple(json.loads(line).get("segment", {}).items())
            continue
        event = decode_event(line)
        place = segment, event.kind, event.scope, event.name, event.phase
        seen[place] += 1
        yield (*place, seen[place]), _Placed(segment, event)


def _difference(mine: Event, other: Event) -> tuple[str, bool] | None:
    """What differs, and whether it is something that was given to the event."""
    # Arguments of transfers name them by a count that another listener may own; what they say is in the shapes too.
    if mine.args != other.args and mine.kind not in RECEIVING:
        return f"{mine.args} and {other.args}", True
    for given, pairs in ((True, (mine.ins, other.ins)), (False, (mine.outs, other.outs))):
        for one, two in zip(*pairs, strict=False):
            if _content(one) != _content(two):
                return one.label or ("input" if given else "output"), given
        if len(pairs[0]) != len(pairs[1]):
            return "number of tensors", given
    return None


def _content(seen: Seen) -> tuple:
    return seen.dtype, seen.shape, seen.digest
