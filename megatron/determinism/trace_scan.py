"""One rank in two runs: what differs first, where it spread, and which transfers carried it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.core.trace.format import Event, Seen, decode_event
from megatron.determinism.trace_align import align
from megatron.determinism.trace_read import Key, RankStream, Segment

TRAVELS = ("collective", "sum")

Streams = tuple[RankStream, RankStream]

_SHOWN = 20
_TRANSFER = frozenset({"axis", "ranks", "seq"})
_FACTS = {"state": frozenset({"at", "shards"}), "collective": _TRANSFER, "sum": _TRANSFER}
"""What has to be known of an event, by kind."""
_CARRIED = tuple(f'{{"e":"{kind}"'.encode() for kind in TRAVELS)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One event that differs. ``order`` counts the events of the rank; ``inputs``, ``outputs`` are tensor labels."""

    order: int
    at: dict[str, Any]
    left: Event
    right: Event
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: bool

    def pairs(self, side: str) -> list[tuple[Seen, Seen]]:
        """Both runs' tensors that differ, of ``ins`` or ``outs``."""
        both = zip(getattr(self.left, side), getattr(self.right, side), strict=False)
        return [(a, b) for a, b in both if a != b]


@dataclass(slots=True)
class RankScan:
    """What a scan of one rank found.

    ``carried`` are the transfers whose input on this rank differed, ``layers`` the first mismatch of each layer,
    ``configurations`` kernels that chose another configuration, ``extra`` the first of the events that one run alone
    has in a segment, and their number.
    ``incomparable`` are the scopes inside ops that have another variant in the other run: there only the ops' own
    events are compared.
    """

    rank: int
    at: dict[str, int]
    common: int = 0
    first: Mismatch | None = None
    carried: set[tuple] = field(default_factory=set)
    layers: dict[str, Mismatch] = field(default_factory=dict)
    configurations: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[tuple[str, Key], tuple[Event, int]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    state: dict[tuple, tuple[str, str]] = field(default_factory=dict)
    followed: set[bytes] = field(default_factory=set)
    incomparable: set[str] = field(default_factory=set)

    def add_extra(self, run: str, key: Key, event: Event) -> None:
        """An event that only one run has; the first one of a segment is kept."""
        first, count = self.extra.get((run, key), (event, 0))
        self.extra[run, key] = first, count + 1

    def drop_extra(self, run: str, key: Key | None) -> None:
        """Forget what only ``run`` has in a segment."""
        if key is not None:
            self.extra.pop((run, key), None)


def transfer_keys(iteration: int, event: Event, labels: tuple[str, ...]) -> list[tuple]:
    """Names of the transfers of an event, the same on every member of its group."""
    if event.name == "exchange":
        return [(iteration, label) for label in labels]
    meta = event.meta
    return [(iteration, event.kind, event.name, meta["axis"], tuple(meta["ranks"]), meta["seq"])]


def layer_of(event: Event) -> str:
    """The layer an event belongs to, or the part of the step where it belongs to none."""
    found = re.search(r"(?:decoder|mtp)\.layers\.\d+|embedding|output_layer|final_norm", event.scope)
    if found:
        return found[0]
    return {"state": "state", "input": "input", "stage": "optimizer"}.get(event.kind, "communication and other")


def scan_rank(rank: int, left: RankStream, right: RankStream, window: tuple[int, int | None]) -> RankScan:
    """Compare one rank's streams on the iterations of ``window``.

    Raises:
        DamagedInputError: a line before the last is damaged.
    """
    scan = RankScan(rank, left.head.get("at", {}))
    order = 0
    last: list[Key | None] = [None, None]
    for one, other in _pair_segments(left, right, window):
        if one is None or other is None:
            alone, name, stream = (one, "A", left) if other is None else (other, "B", right)
            for raw in alone.events:
                scan.add_extra(name, alone.key, _decoded(raw, stream))
        elif one.at["pass"] == "state":
            _compare(scan, one, other, (left, right), order)
        elif one.events == other.events:
            scan.common += len(one.events)
        elif scan.first is None or not _alike(one, other):
            _compare(scan, one, other, (left, right), order)
        else:
            _follow(scan, one, other, (left, right), order)
        last = [one.key if one else last[0], other.key if other else last[1]]
        order += len((one or other).events)
    # Where a file is cut off inside a segment, the rest of it in the other run is no difference.
    for stream, key, whole in ((left, last[0], "B"), (right, last[1], "A")):
        if stream.cut is not None:
            scan.drop_extra(whole, key)
    scan.cut = [f"{stream.path}: {stream.cut}" for stream in (left, right) if stream.cut is not None]
    return scan


def _pair_segments(
    left: RankStream, right: RankStream, window: tuple[int, int | None]
) -> Iterator[tuple[Segment | None, Segment | None]]:
    """Segments of equal key, in the order of whichever stream has them later; then those that one run alone has.

    Where a stream was cut off, what only the other has is no difference.
    """
    waiting: tuple[dict[Key, Segment], dict[Key, Segment]] = ({}, {})
    sources = [iter(left.segments()), iter(right.segments())]
    running = [True, True]
    while any(running):
        for side in (0, 1):
            if not running[side]:
                continue
            segment = next(sources[side], None)
            if segment is None:
                running[side] = False
                continue
            iteration = segment.at["iteration"]
            if iteration < window[0] or (window[1] is not None and iteration > window[1]):
                continue
            partner = waiting[1 - side].pop(segment.key, None)
            if partner is None:
                waiting[side][segment.key] = segment
            else:
                yield (segment, partner) if side == 0 else (partner, segment)
    if left.cut is None and right.cut is None:
        yield from ((segment, None) for segment in waiting[0].values())
        yield from ((None, segment) for segment in waiting[1].values())


def _decoded(raw: bytes, stream: RankStream) -> Event:
    try:
        event = decode_event(raw)
        missing = _FACTS.get(event.kind, frozenset()) - event.meta.keys() - {"seq" if event.name == "exchange" else ""}
        if missing:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise DamagedInputError(f"{stream.path}: an event is damaged ({error}): {raw[:80]!r}") from error
    return event


def _compare(scan: RankScan, one: Segment, other: Segment, streams: Streams, order: int) -> None:
    """Compare two segments event by event."""
    left = [_decoded(raw, streams[0]) for raw in one.events]
    right = [_decoded(raw, streams[1]) for raw in other.events]
    scan.incomparable |= _inside_other_variants(left, right)
    if scan.incomparable:
        left, right = ([e for e in run if _outer(e.scope) not in scan.incomparable] for run in (left, right))
    for i, j in align(left, right):
        if i is None or j is None:
            scan.add_extra("A" if j is None else "B", one.key, left[i] if j is None else right[j])
            continue
        scan.common += 1
        a, b = left[i], right[j]
        if a.kind == "state" and a.meta["at"] == "before":
            place = (one.at["iteration"], a.name, a.scope, tuple(a.meta["shards"]), a.meta.get("start", 0))
            scan.state[place] = (a.outs[0].digest, b.outs[0].digest)
        _note_event(scan, one, a, b, order + i)


def _inside_other_variants(left: Sequence[Event], right: Sequence[Event]) -> set[str]:
    """The scopes inside ops that ran as one variant in one run and as another one in the other."""
    one, other = (
        {(e.scope, e.name.removesuffix(".backward")): e.meta.get("variant") for e in run if e.kind == "kernel"}
        for run in (left, right)
    )
    return {f"{scope}:{name}" for (scope, name), variant in one.items() if other.get((scope, name), variant) != variant}


def _outer(scope: str) -> str:
    """The scope of an event without the operation of the backward that ran there."""
    return scope.partition("|")[0]


def _alike(one: Segment, other: Segment) -> bool:
    """Whether two segments have the same events, whatever the values."""
    pairs = zip(one.events, other.events, strict=False)
    return len(one.events) == len(other.events) and all(_head(a) == _head(b) for a, b in pairs)


def _head(raw: bytes) -> bytes:
    return raw[: raw.index(b',"i":')] if b',"i":' in raw else raw


def _follow(scan: RankScan, one: Segment, other: Segment, streams: Streams, order: int) -> None:
    """Behind the first mismatch: only what is carried to other ranks, and the first mismatch of each scope."""
    for position, (a, b) in enumerate(zip(one.events, other.events, strict=True)):
        scan.common += 1
        if a == b:
            continue
        scope = a[: a.find(b',"n":')]
        if scope in scan.followed and not a.startswith(_CARRIED) and b'"config"' not in a:
            continue
        scan.followed.add(scope)
        _note_event(scan, one, _decoded(a, streams[0]), _decoded(b, streams[1]), order + position)


def _note_event(scan: RankScan, segment: Segment, a: Event, b: Event, order: int) -> None:
    chosen = a.meta.get("config"), b.meta.get("config")
    if chosen[0] != chosen[1] and len(scan.configurations) < _SHOWN:
        where = {"iteration": segment.at["iteration"], "scope": a.scope, "op": a.name}
        scan.configurations.append({**where, "a": chosen[0], "b": chosen[1]})
    inputs = tuple(x.label for x, y in zip(a.ins, b.ins, strict=False) if _bits(x) != _bits(y))
    outputs = tuple(x.label for x, y in zip(a.outs, b.outs, strict=False) if _bits(x) != _bits(y))
    args = a.args != b.args
    if not inputs and not outputs and not args:
        return
    mismatch = Mismatch(order, segment.at, a, b, inputs, outputs, args)
    if scan.first is None:
        scan.first = mismatch
    scan.layers.setdefault(layer_of(a), mismatch)
    if a.kind in TRAVELS and inputs:
        scan.carried.update(transfer_keys(segment.at["iteration"], a, inputs))


def _bits(seen: Seen) -> tuple:
    return seen.dtype, seen.shape, seen.digest
