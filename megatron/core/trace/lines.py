"""The lines of a step: what identifies each event, and the notes of what it was given and made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from megatron.core.trace.format import encode_line, event_end, event_start
from megatron.core.trace.reader import Note

Parts: TypeAlias = list[str | Sequence[Note]]
"""Lines in parts: text, and notes of which the digests may be on their way."""


class Lines:
    """Puts lines together as events happen, all but the digests."""

    def __init__(self) -> None:
        self._parts: Parts = []
        self._occurrences: dict[tuple[str, str, str], int] = {}
        self._events = 0

    def segment(self, kind: str, iteration: int, coordinates: Mapping[str, int]) -> None:
        """What follows belongs to this part of a step."""
        self._occurrences.clear()
        self._add({"segment": {"pass": kind, "iteration": iteration, **coordinates}})

    def event(
        self,
        kind: str,
        place: tuple[str, str, str],
        ins: Sequence[Note],
        outs: Sequence[Note],
        args: str,
        meta: Mapping[str, Any] | None,
    ) -> None:
        """One event; ``place`` is its scope, name and phase."""
        occurrence = self._occurrences.get(place, 0)
        self._occurrences[place] = occurrence + 1
        before, after = event_start(kind, *place)
        # Copies: the caller may go on changing its lists.
        self._parts += (f"{before}{occurrence}{after}", tuple(ins), '],"r":[', tuple(outs), event_end(args, meta))
        self._events += 1

    def end(self, iteration: int) -> None:
        """The step is complete."""
        self._add({"end": iteration, "events": self._events})

    def take(self) -> Parts:
        """All lines since this was last called; another step begins."""
        parts, self._parts, self._events = self._parts, [], 0
        return parts

    def _add(self, line: Mapping[str, Any]) -> None:
        self._parts.append(encode_line(line).decode())
