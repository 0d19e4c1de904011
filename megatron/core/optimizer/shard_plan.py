"""Which ranges of a flat buffer the optimizer treats alike, and where a buffer's element lies in its state; pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.core.contracts.flat_buffer import Piece, Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Buffer elements ``start ... stop`` of one span whose pieces agree in ``fact``; both ends are multiples of
    ``SHARD_ALIGNMENT``, so kernels and norm blocks see the same borders on every layout."""

    start: int
    stop: int
    fact: Hashable


def plan_runs(span: Span, fact: Callable[[Piece], Hashable]) -> tuple[Run, ...]:
    """The longest runs of a span in which ``fact(piece)`` stays the same; padding belongs to the piece before it, and
    a span of nothing but padding has none."""
    runs: list[Run] = []
    for piece in span.pieces:
        value = fact(piece)
        if not runs or runs[-1].fact != value:
            runs.append(Run(start=piece.offset, stop=span.stop, fact=value))
    stops = [run.start for run in runs[1:]] + [span.stop]
    return tuple(replace(run, stop=stop) for run, stop in zip(runs, stops, strict=False))


def split_by_owner(pieces: Iterable[Piece], owned: Sequence[Span]) -> Iterator[tuple[Piece, bool]]:
    """The same pieces cut at the borders of a rank's own spans, each with whether it lies in one of them."""
    for piece in pieces:
        inside = [(span.start, span.stop) for span in owned if span.start < piece.stop and piece.offset < span.stop]
        borders = {piece.offset, piece.stop}
        borders |= {at for ends in inside for at in ends if piece.offset < at < piece.stop}
        ordered = sorted(borders)
        for start, stop in zip(ordered, ordered[1:], strict=False):
            part = replace(piece, start=piece.start + start - piece.offset, length=stop - start, offset=start)
            yield part, any(begin <= start and stop <= end for begin, end in inside)


class StateOffsets:
    """Spans of a buffer laid one after the other: where a buffer element lies in the flat state."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._starts = [span.start for span in spans]
        self._bases = [0]
        for span in spans:
            self._bases.append(self._bases[-1] + span.length)

    @property
    def numel(self) -> int:
        """Elements of the flat state."""
        return self._bases[-1]

    def at(self, buffer_offset: int) -> int:
        """State element of a buffer element that lies in one of the spans."""
        span = bisect.bisect_right(self._starts, buffer_offset) - 1
        return self._bases[span] + buffer_offset - self._starts[span]
