"""The lines of a trace file, and the names they are written under; needs no torch.

A file belongs to one rank and is a sequence of JSON objects, one a line:

* ``{"trace": 3, ...}``: first line; which rank this is, where it stands, level and window;
* ``{"segment": {...}}``: the events after it belong to this part of a step;
* ``{"e": ...}``: one event;
* ``{"end": iteration, "events": n}``: an iteration is complete;
* ``{"closed": events}``: last line of a run that came to its end.

Two runs that did the same write the same bytes: no times, addresses or process numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

FORMAT = 3

LEVELS = ("semantic", "module", "op", "kernel")
"""Each level records what the levels before it record, and more."""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

_MOST_KEPT = 1 << 16
"""Parts of lines of each kind that are remembered: most repeat from step to step."""

TRACE_FILES = "trace_rank_*.jsonl"


def trace_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"trace_rank_{rank:05d}.jsonl"


def dump_folder(rank: int) -> str:
    """Name of the folder with the tensors that one rank dumped."""
    return f"dump_rank_{rank:05d}"


@dataclass(frozen=True, slots=True)
class Seen:
    """One tensor of an event: what it is called there, its metadata, the digest of its logical elements.

    ``strides`` is ``None`` where the tensor is contiguous. ``rows`` is the digest of its rows without their order, and
    ``chunks`` digests of up to 16 runs of rows; both only for index-like and dispatched tensors. ``unwritten`` says
    that nothing was seen to write the whole of its storage.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    digest: str
    rows: str | None = None
    chunks: tuple[str, ...] = ()
    unwritten: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a segment.

    ``kind`` is ``state``, ``input``, ``collective``, ``sum``, ``stage``, ``checkpoint``, ``module``, ``op`` or
    ``kernel``; the ``occurrence`` counts events of one scope, name and phase in the segment. ``args`` are the arguments
    that are not tensors, ``meta`` what else is known (variant, configuration, group).
    """

    kind: str
    scope: str
    name: str
    occurrence: int
    phase: str
    ins: tuple[Seen, ...] = ()
    outs: tuple[Seen, ...] = ()
    args: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> tuple:
        """What stays the same when only values differ: place and metadata, without occurrence and digests."""
        tensors = tuple((t.label, t.dtype, t.shape) for t in (*self.ins, *self.outs))
        return self.kind, self.scope, self.name, self.phase, tensors


def _decode_seen(raw: Sequence) -> Seen:
    label, dtype, shape, strides, digest, *tail = raw
    rows, chunks, unwritten = tail or (None, (), False)
    strides = None if strides is None else tuple(strides)
    return Seen(label, dtype, tuple(shape), strides, digest, rows, tuple(chunks), unwritten)


@lru_cache(_MOST_KEPT)
def tensor_start(label: str, dtype: Any, shape: Sequence[int], strides: Sequence[int] | None) -> str:
    """A tensor's entry up to its digest; ``dtype`` as torch names it."""
    name = str(dtype).removeprefix("torch.")
    return _ENCODE([label, name, list(shape), strides and list(strides), ""])[:-2]


@lru_cache(_MOST_KEPT)
def event_start(kind: str, scope: str, name: str, phase: str) -> tuple[str, str]:
    """An event up to its number of occurrence, and from there to its first tensor."""
    first = _ENCODE({"e": kind, "s": scope, "n": name})[:-1]
    return f'{first},"o":', f',"p":{_ENCODE(phase)},"i":['


def event_end(args: str, meta: Mapping[str, Any] | None) -> str:
    """An event behind its last tensor. Facts that compare equal under one name are to be of one type."""
    if not args and not meta:
        return "]}\n"
    facts = tuple(meta.items()) if meta else ()
    try:
        return _known_end(args, facts)
    except TypeError:  # a fact is a list or a mapping
        return _end(args, facts)


def _end(args: str, facts: tuple[tuple[str, Any], ...]) -> str:
    said = f',"a":{_ENCODE(args)}' if args else ""
    return f']{said},"m":{_ENCODE(dict(facts))}}}\n' if facts else f"]{said}}}\n"


_known_end = lru_cache(_MOST_KEPT)(_end)


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Any object as one line."""
    return _ENCODE(line).encode() + b"\n"


def decode_event(raw: bytes) -> Event:
    """The event of one line.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    line = json.loads(raw)
    return Event(
        kind=line["e"],
        scope=line["s"],
        name=line["n"],
        occurrence=line["o"],
        phase=line["p"],
        ins=tuple(_decode_seen(t) for t in line["i"]),
        outs=tuple(_decode_seen(t) for t in line["r"]),
        args=line.get("a", ""),
        meta=line.get("m", {}),
    )
