"""Recorder: collects the events of one rank's step and writes them as lines when the step is over.

Digests stay on the device until then, so recording never waits for it, talks to no other rank and draws no random
number.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.trace.dump import Dump
from megatron.core.trace.flatten import named_tensors, plain_arguments
from megatron.core.trace.format import Event, Seen, encode_event, encode_line
from megatron.core.trace.storage import UnwrittenStorage
from megatron.core.trace.tensor_digest import Digest, Digester, hex64

_INDEX_TYPES = frozenset({torch.int16, torch.int32, torch.int64})


@dataclass(slots=True)
class Note:
    """A tensor as it was: metadata, and where its digests lie among the pending ones."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    unwritten: bool
    whole: int
    by_row: int | None


@dataclass(slots=True)
class _Pending:
    """An event whose digests are still on the device."""

    kind: str
    scope: str
    name: str
    phase: str
    ins: list[Note]
    outs: list[Note]
    args: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """One rank's recorder; ``active`` only inside traced steps.

    ``busy`` while it does work of its own, which is no part of the run. ``write`` takes the lines of a step at once.
    Where ``dump`` is given, arguments and results of the events it wants are kept too. ``digester`` may be replaced by
    one with faster ops.
    """

    def __init__(self, write: Callable[[bytes], None], dump: Dump | None = None) -> None:
        self.active, self.busy = False, False
        self.unwritten = UnwrittenStorage()
        self._write, self._dump = write, dump
        self.digester = Digester()
        self._events: list[_Pending | dict[str, Any]] = []
        self._digests: list[Digest] = []
        self._scopes: list[str] = []
        self._marks: tuple[list[int], list[str]] = ([], [])
        self._pass = ""
        self._counts: Counter[str] = Counter()
        self.written = 0

    # Where we are.

    def begin_step(self) -> None:
        """Start recording a step."""
        self.active = True
        self._counts.clear()
        self._marks = ([], [])

    def end_step(self, iteration: int, *, complete: bool) -> None:
        """Stop recording and write what the step left; an incomplete one (an error ended it) gets no end line."""
        self.active = False
        self._scopes.clear()
        events = sum(isinstance(event, _Pending) for event in self._events)
        self.flush()
        if complete:
            self._write(encode_line({"end": iteration, "events": events}))

    def segment(self, kind: str, iteration: int, **coordinates: int) -> None:
        """All that follows belongs to this part of the step (``state``, ``forward``, ``backward``, ``optimizer``)."""
        self._pass = kind
        self._events.append({"segment": {"pass": kind, "iteration": iteration, **coordinates}})

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """What happens inside is named after ``name``."""
        self.push(name)
        try:
            yield
        finally:
            self.pop()

    def push(self, name: str) -> None:
        """Enter a scope; autograd nodes made from here on belong to it."""
        self._scopes.append(name)
        self._mark()

    def pop(self) -> None:
        """Leave the innermost scope."""
        if self._scopes:
            self._scopes.pop()
            self._mark()

    def _mark(self) -> None:
        sequence, scopes = self._marks
        sequence.append(torch.autograd._get_sequence_nr())
        scopes.append(self._scopes[-1] if self._scopes else "")

    def scope(self) -> str:
        """Innermost scope; in a backward that of the forward that made the running autograd node, and its name."""
        if self._scopes:
            return self._scopes[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            return name
        at = bisect.bisect_right(self._marks[0], node._sequence_nr()) - 1
        return f"{self._marks[1][at] if at >= 0 else ''}|{name}"

    def phase(self) -> str:
        """The segment's pass, or ``recompute`` for a forward that a backward repeats."""
        return "recompute" if self._pass == "backward" and self._scopes else self._pass

    def count(self, channel: str) -> int:
        """As ``Probe.count``."""
        self._counts[channel] += 1
        return self._counts[channel]

    # What happened.

    def note(self, value: Any, label: str = "", *, rows: bool = False, flag: bool = False) -> list[Note]:
        """Digest every tensor in ``value`` as it is now. With ``flag`` storage that nobody wrote is marked."""
        notes = []
        with self.unseen():
            for name, tensor in named_tensors(value, label):
                if tensor.is_sparse or tensor.device.type == "meta" or tensor.layout != torch.strided:
                    continue
                indexed = tensor.dim() > 0 and (rows or tensor.dtype in _INDEX_TYPES)
                note = Note(
                    label=name,
                    dtype=_type_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    strides=None if tensor.is_contiguous() else tensor.stride(),
                    unwritten=flag and self.unwritten.holds(tensor),
                    whole=self._keep(self.digester.whole(tensor)),
                    by_row=self._keep(self.digester.by_row(tensor)) if indexed else None,
                )
                notes.append(note)
        return notes

    def note_digests(self, what: Sequence[tuple[str, torch.dtype, int]], digests: torch.Tensor) -> list[Note]:
        """Notes of flat tensors whose digests ``[n, 2]`` were made elsewhere; ``what`` gives label, type and number of
        elements of each."""
        return [
            Note(label, _type_name(dtype), (numel,), None, False, self._keep(digest), None)
            for (label, dtype, numel), digest in zip(what, self.digester.adopt(digests), strict=True)
        ]

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What happens inside is work of the recorder's own, and no event."""
        was, self.busy = self.busy, True
        try:
            # Past the dispatch mode of the op level, which would cost ten times the work itself.
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                yield
        finally:
            self.busy = was

    def _keep(self, digest: Digest) -> int:
        self._digests.append(digest)
        return len(self._digests) - 1

    def event(
        self,
        kind: str,
        name: str,
        *,
        ins: list[Note] | None = None,
        outs: list[Note] | None = None,
        scope: str | None = None,
        args: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one event from notes taken before and after it."""
        where = self.scope() if scope is None else scope
        meta = dict(meta or {})
        self._events.append(_Pending(kind, where, name, self.phase(), ins or [], outs or [], args, meta))

    def around(
        self,
        kind: str,
        name: str,
        call: Callable[[], Any],
        *,
        ins: Any,
        outs: Any = None,
        meta: Mapping[str, Any] | None = None,
        rows: bool = False,
    ) -> Any:
        """As ``Probe.around``."""
        if not self.active:
            return call()
        scope = self.scope()
        before = self.note(ins, rows=rows, flag=True)
        saved = self.save(kind, scope, name, ins)
        with self.scoped(f"{scope}:{name}"):
            result = call()
        filled = result if outs is None else outs
        self.unwritten.written(filled)
        after = self.note(filled, "result" if outs is None else "", rows=rows)
        # The call may have added to the facts what it chose.
        facts = dict(meta or {})
        if saved is not None:
            with self.unseen():
                facts["dump"] = saved.finish(filled)
        self.event(kind, name, ins=before, outs=after, scope=scope, args=plain_arguments(ins), meta=facts)
        return result

    def save(self, kind: str, scope: str, name: str, arguments: Any) -> Any:
        """Keep the arguments of an event where they are wanted; ``finish(results)`` of what comes back completes it."""
        if self._dump is None or not self._dump.wants(scope, name):
            return None
        with self.unseen():
            return self._dump.begin(kind, scope, name, arguments)

    def flush(self) -> None:
        """Bring the digests to the host, in one transfer, and write the lines."""
        values = self.digester.numbers(self._digests)
        occurrences: Counter[tuple[str, str, str]] = Counter()
        lines = []
        for pending in self._events:
            if isinstance(pending, dict):
                occurrences.clear()
                lines.append(encode_line(pending))
                continue
            place = pending.scope, pending.name, pending.phase
            lines.append(encode_event(_finished(pending, occurrences[place], values)))
            occurrences[place] += 1
            self.written += 1
        self._events, self._digests = [], []
        self.unwritten.clear()
        if lines:
            self._write(b"".join(lines))


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finished(pending: _Pending, occurrence: int, values: list[list[int]]) -> Event:
    def seen(note: Note) -> Seen:
        rows = () if note.by_row is None else tuple(hex64(v) for v in values[note.by_row])
        digest = "".join(hex64(v) for v in values[note.whole])
        return Seen(
            note.label,
            note.dtype,
            note.shape,
            note.strides,
            digest,
            rows[0] if rows else None,
            rows[1:],
            note.unwritten,
        )

    return Event(
        kind=pending.kind,
        scope=pending.scope,
        name=pending.name,
        occurrence=occurrence,
        phase=pending.phase,
        ins=tuple(seen(n) for n in pending.ins),
        outs=tuple(seen(n) for n in pending.outs),
        args=pending.args,
        meta=pending.meta,
    )
