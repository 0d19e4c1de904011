"""Trace folders made without training: the same writers, events by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.trace.format import Event, Seen, encode_line, trace_file
from megatron.training.observe.trace_writer import TraceWriter, write_trace_manifest
from tests.support.fingerprints import manifest_parts

Steps = Mapping[int, list[Event]]
"""Events of the forward of each iteration."""


def encode_event(event: Event) -> bytes:
    """An event as one line."""
    line: dict[str, Any] = {
        "e": event.kind,
        "s": event.scope,
        "n": event.name,
        "o": event.occurrence,
        "p": event.phase,
        "i": [_encode_seen(t) for t in event.ins],
        "r": [_encode_seen(t) for t in event.outs],
    }
    if event.args:
        line["a"] = event.args
    if event.meta:
        line["m"] = event.meta
    return encode_line(line)


def _encode_seen(seen: Seen) -> list:
    """A tensor as a JSON list; the tail is left out where it is empty."""
    out: list[Any] = [seen.label, seen.dtype, list(seen.shape), seen.strides and list(seen.strides), seen.digest]
    if seen.rows is not None or seen.unwritten:
        out += [seen.rows, list(seen.chunks), seen.unwritten]
    return out


def seen(digest: str, label: str = "x", rows: str | None = None) -> Seen:
    """A small tensor."""
    return Seen(label, "float32", (4, 2), None, f"{digest:0>32}", rows, () if rows is None else (digest,))


def op(
    name: str, ins: str, outs: str, scope: str = "decoder.layers.0.mixer", rows: str | None = None, **changes: Any
) -> Event:
    """An operation that read one tensor and made another."""
    event = Event("op", scope, name, 0, "forward", (seen(ins),), (seen(outs, "result", rows),))
    return replace(event, **changes)


def all_gather(ins: str, outs: str, ranks: tuple[int, ...], number: int = 1) -> Event:
    """A collective over some ranks."""
    meta = {"axis": "tp", "ranks": list(ranks), "seq": number}
    return op("all_gather", ins, outs, kind="collective", meta=meta)


def write_trace(
    folder: Path,
    ranks: Mapping[int, Steps],
    *,
    level: str = "op",
    iterations: tuple[int, int | None] = (1, None),
    traced: Iterable[int] | None = None,
    trajectory: Mapping[str, Any] | None = None,
    closed: bool = True,
) -> Path:
    """A finished trace folder (a killed run's where not ``closed``)."""
    whole, launch = manifest_parts()
    what = {"level": level, "iterations": list(iterations), "ranks": sorted(ranks if traced is None else traced)}
    write_trace_manifest(folder, {"trajectory": {**whole, **(trajectory or {})}, "launch": launch}, what)
    for rank, steps in ranks.items():
        writer = TraceWriter()
        at = {"tp": rank, "dp": 0, "pp": 0}
        writer.open(folder / trace_file(rank), {"rank": rank, "world": len(ranks), "at": at, "level": level})
        for iteration, events in steps.items():
            segment = {"pass": "forward", "iteration": iteration, "chunk": 0, "shard": 0, "microbatch": 0}
            writer.write(encode_line({"segment": segment}))
            writer.write(b"".join(encode_event(event) for event in events))
            writer.write(encode_line({"end": iteration, "events": len(events)}))
        if closed:
            writer.close(sum(map(len, steps.values())))
    return folder
