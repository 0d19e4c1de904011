"""Recorder: collects the events of one rank's step and writes them as lines when the step is over.

Digests stay on the device until then, so inside a step recording does not wait for it; it talks to no other rank and
draws no random number. An event's line is put together when it happens, but for the digests; these are filled in, and
the lines of a step written at once, by a thread that waits for the device. A process that is killed loses the events of
the step its device works on, and no other.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from megatron.core.ops.rerun import Rerun, current_rerun
from megatron.core.trace.dump import Dump
from megatron.core.trace.flatten import Named, named_tensors, plain_arguments
from megatron.core.trace.format import Rendering, encode_line
from megatron.core.trace.storage import UnwrittenStorage
from megatron.core.trace.tensor_digest import Digest, Digester, Promised, Sent

_INDEX_TYPES = frozenset({torch.int16, torch.int32, torch.int64})


@dataclass(slots=True)
class Note:
    """A tensor as it was: its entry in a line up to the digest, and its digests, which may be pending."""

    start: str
    whole: Digest
    by_row: Digest | None = None
    unwritten: bool = False


@dataclass(slots=True)
class Work:
    """What a recorder has done: tensors looked at, those of them whose digest was known, seconds of the thread that
    trains and of the one that writes."""

    events: int = 0
    tensors: int = 0
    known: int = 0
    seconds: float = 0.0
    writing_s: float = 0.0


_Lines = list[str | Sequence[Note]]
"""Lines of a step, in parts: text, and notes of which the digests may be on their way."""


def _filled(lines: _Lines, sent: Sent) -> bytes:
    """The text with the digests, which have arrived."""
    parts = [part if isinstance(part, str) else ",".join([_entry(note, sent) for note in part]) for part in lines]
    return "".join(parts).encode()


def _entry(note: Note, sent: Sent) -> str:
    whole = f"{note.start}{sent.text(note.whole)}"
    if note.by_row is not None:
        rows, *chunks = sent.texts_by_row(note.by_row)
        listed = ",".join([f'"{chunk}"' for chunk in chunks])
        return f'{whole}","{rows}",[{listed}],{"true" if note.unwritten else "false"}]'
    return f'{whole}",null,[],true]' if note.unwritten else f'{whole}"]'


@dataclass(slots=True)
class _Read:
    """A tensor that was read in this segment, its version then, and its digests as far as they were asked for."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    whole: Digest
    by_row: Digest | None = None


class _Marks:
    """Scopes that a forward entered and left, by the sequence numbers of the autograd nodes it made."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._scopes: list[str | None] = []

    def add(self, scope: str | None) -> None:
        """Nodes made from here on, by the thread that asks, belong to ``scope``."""
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._scopes.append(scope)

    def at(self, node: Any) -> str | None:
        """The scope of a node of this forward."""
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._scopes[place] if place >= 0 else None


class Recorder:
    """One rank's recorder; ``active`` only inside traced steps.

    ``busy`` while it does work of its own, which is no part of the run. ``write`` takes the lines of a step at once,
    maybe in another thread. Where ``dump`` is given, arguments and results of the events it wants are kept too.
    ``digester`` may be replaced by one with faster ops.

    With ``trusting`` a tensor that was digested in the same segment, and that torch's version counter says is unchanged
    since, is not read again where a caller allows that. A write behind torch's back, a race for instance, then shows
    in what is made of the tensor, and not between the two.
    """

    def __init__(self, write: Callable[[bytes], None], dump: Dump | None = None, *, trusting: bool = False) -> None:
        self.active, self.busy, self.trusting = False, False, trusting
        self.unwritten = UnwrittenStorage()
        self._write, self._dump = write, dump
        self.digester = Digester()
        self.work = Work()
        self._rendering = Rendering()
        self._lines: _Lines = []
        self._occurrences: dict[tuple[str, str, str], int] = {}
        self._recent: dict[int, _Read] = {}
        self._scopes: list[tuple[str, Any]] = []
        self._marks: WeakKeyDictionary[Rerun, _Marks] = WeakKeyDictionary()
        self._first_marks = _Marks()
        self._pass = ""
        self._counts: Counter[str] = Counter()
        self._in_step = 0
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def written(self) -> int:
        """Events so far."""
        return self.work.events

    # Where we are.

    def begin_step(self) -> None:
        """Start recording a step."""
        self.active, self._in_step = True, 0
        self._counts.clear()
        self._first_marks = _Marks()

    def end_step(self, iteration: int, *, complete: bool) -> None:
        """Stop recording and write what the step left; an incomplete one (an error ended it) gets no end line.

        Raises:
            OSError: the lines of this step or the one before could not be written.
        """
        self.active = False
        self._scopes.clear()
        if complete:
            self._lines.append(encode_line({"end": iteration, "events": self._in_step}).decode())
        self._send()
        if not complete:
            self.settle()

    def segment(self, kind: str, iteration: int, **coordinates: int) -> None:
        """All that follows belongs to this part of the step (``state``, ``forward``, ``backward``, ``optimizer``)."""
        self._pass = kind
        self._occurrences.clear()
        self._recent.clear()
        self._lines.append(encode_line({"segment": {"pass": kind, "iteration": iteration, **coordinates}}).decode())

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """What happens inside is named after ``name``."""
        self.push(name)
        depth = len(self._scopes)
        try:
            yield
        finally:
            # An error may have left scopes inside open.
            del self._scopes[depth:]
            self.pop(name)

    def push(self, name: str, kept: Any = None) -> None:
        """Enter a scope; autograd nodes made from here on belong to it. ``kept`` is for whoever leaves it."""
        self._scopes.append((name, kept))
        self._mark()

    def pop(self, name: str) -> Any:
        """Leave the innermost scope; what was kept there.

        Raises:
            RuntimeError: that is another one.
        """
        inner, kept = self._scopes.pop() if self._scopes else (None, None)
        if inner != name:
            raise RuntimeError(f"the trace left {name} where it was in {inner or 'no scope'}")
        self._mark()
        return kept

    def _mark(self) -> None:
        # Nodes are made where there is a gradient to come; a backward makes none, and is in no order with forwards.
        if torch.is_grad_enabled():
            again = current_rerun()
            marks = self._first_marks if again is None else self._marks.setdefault(again, _Marks())
            marks.add(self._scopes[-1][0] if self._scopes else None)

    def scope(self) -> str:
        """Innermost scope; in a backward that of the forward that made the running autograd node, and its name."""
        if self._scopes:
            return self._scopes[-1][0]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            return name
        again = current_rerun()
        # What asks for a rerun belongs to the forward around it.
        return f"{self._scope_of(node, again.outer if again is not None and again.in_forward else again)}|{name}"

    def _scope_of(self, node: Any, made_in: Rerun | None) -> str:
        """The scope in which a node was made, by the first forward or in a rerun."""
        if made_in is None:
            return self._first_marks.at(node) or ""
        found = self._marks[made_in].at(node) if made_in in self._marks else None
        return self._scope_of(made_in.node, made_in.outer) if found is None else found

    def phase(self) -> str:
        """The segment's pass, or ``recompute`` for a forward that a backward repeats."""
        again = current_rerun()
        return "recompute" if again is not None and again.in_forward else self._pass

    def count(self, channel: str) -> int:
        """As ``Probe.count``."""
        self._counts[channel] += 1
        return self._counts[channel]

    # What happened.

    def note(
        self, value: Any, label: str = "", *, rows: bool = False, flag: bool = False, reuse: bool = False
    ) -> list[Note]:
        """As ``noted``, for every tensor in ``value``."""
        found = [(label, value)] if type(value) is torch.Tensor else named_tensors(value, label)
        return self.noted(found, rows=rows, flag=flag, reuse=reuse)

    def noted(
        self, tensors: Sequence[Named], *, rows: bool = False, flag: bool = False, reuse: bool = False
    ) -> list[Note]:
        """Digest tensors as they are now, by one launch. With ``flag`` storage that nobody wrote is marked, with
        ``reuse`` digests that are known are taken."""
        start = time.perf_counter()
        was, self.busy = self.busy, True
        try:
            notes = self._noted(tensors, rows, flag, reuse and self.trusting)
        finally:
            self.busy = was
        self.work.seconds += time.perf_counter() - start
        return notes

    def _noted(self, tensors: Sequence[Named], rows: bool, flag: bool, reuse: bool) -> list[Note]:
        notes: list[Note] = []
        unread: list[torch.Tensor] = []
        waiting: list[Note] = []
        for label, tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_meta:
                continue
            dtype, shape = tensor.dtype, tensor.shape
            contiguous = tensor.is_contiguous()
            known = self._known(tensor, dtype) if reuse and contiguous else None
            start = self._rendering.tensor(label, dtype, shape, None if contiguous else tensor.stride())
            note = Note(start, [] if known is None else known.whole)
            if known is None:
                unread.append(tensor)
                waiting.append(note)
            if flag:
                note.unwritten = self.unwritten.holds(tensor)
            if (rows or dtype in _INDEX_TYPES) and shape:
                note.by_row = self._by_row(tensor, shape, known)
            notes.append(note)
        if unread:
            for tensor, note, digest in zip(unread, waiting, self.digester.whole(unread), strict=True):
                note.whole = digest
                if self.trusting:
                    read = _Read(weakref.ref(tensor), tensor._version, digest, note.by_row)
                    self._recent[tensor.data_ptr()] = read
        self.work.tensors += len(notes)
        self.work.known += len(notes) - len(unread)
        return notes

    def _by_row(self, tensor: torch.Tensor, shape: torch.Size, known: _Read | None) -> Digest:
        seen = None if known is None else known.tensor()
        if known is None or seen is None or seen.shape != shape:
            return self.digester.by_row(tensor)
        if known.by_row is None:
            known.by_row = self.digester.by_row(tensor)
        return known.by_row

    def _known(self, tensor: torch.Tensor, dtype: torch.dtype) -> _Read | None:
        read = self._recent.get(tensor.data_ptr())
        if read is None:
            return None
        seen = read.tensor()
        if seen is None or seen._version != read.version:
            return None
        if seen is tensor:
            return read
        same = tensor._version == read.version and seen.dtype is dtype and seen.numel() == tensor.numel()
        return read if same and seen.is_contiguous() else None

    def starts(self, what: Iterable[tuple[str, torch.dtype, int]]) -> list[str]:
        """What a line says of flat tensors up to their digests; label, type and number of elements of each."""
        return [self._rendering.tensor(label, dtype, (numel,), None) for label, dtype, numel in what]

    def note_digests(self, starts: Sequence[str], digests: torch.Tensor) -> list[Note]:
        """Notes of flat tensors whose digests ``[n, 2]`` were made elsewhere."""
        notes = self.promise(starts)
        self.keep(notes, digests)
        return notes

    def promise(self, starts: Sequence[str]) -> list[Note]:
        """The same, to be recorded before the digests are made: ``keep`` has to follow in the same step."""
        return [Note(start, Promised()) for start in starts]

    def keep(self, promised: Sequence[Note], digests: torch.Tensor) -> None:
        """Give promised notes their digests ``[n, 2]``."""
        for note, digest in zip(promised, self.digester.adopt(digests), strict=True):
            cast(Promised, note.whole).made = digest

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

    def event(
        self,
        kind: str,
        name: str,
        *,
        ins: Sequence[Note] = (),
        outs: Sequence[Note] = (),
        scope: str | None = None,
        args: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one event from notes taken before and after it."""
        start = time.perf_counter()
        where, phase = self.scope() if scope is None else scope, self.phase()
        place = where, name, phase
        occurrence = self._occurrences.get(place, 0)
        self._occurrences[place] = occurrence + 1
        before, after = self._rendering.head(kind, where, name, phase)
        # Copies: whoever took the notes may go on with its list.
        head, tail = f"{before}{occurrence}{after}", self._rendering.tail(args, meta)
        self._lines += (head, tuple(ins), '],"r":[', tuple(outs), tail)
        self._in_step += 1
        self.work.events += 1
        self.work.seconds += time.perf_counter() - start

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
        before = self.note(ins, rows=rows, flag=True, reuse=True)
        saved = self.save(kind, scope, name, ins)
        with self.scoped(f"{scope}:{name}"):
            result = call()
        filled = result if outs is None else outs
        self.unwritten.written(filled)
        after = self.note(filled, "result" if outs is None else "", rows=rows)
        if saved is not None:
            with self.unseen():
                meta = {**(meta or {}), "dump": saved.finish(filled)}
        # The call may have added to the facts what it chose.
        self.event(kind, name, ins=before, outs=after, scope=scope, args=plain_arguments(ins), meta=meta)
        return result

    def save(self, kind: str, scope: str, name: str, arguments: Any) -> Any:
        """Keep the arguments of an event where they are wanted; ``finish(results)`` of what comes back completes it."""
        if self._dump is None or not self._dump.wants(scope, name):
            return None
        with self.unseen():
            return self._dump.begin(kind, scope, name, arguments)

    def flush(self) -> None:
        """Write all that was recorded; waits for the device.

        Raises:
            OSError: it could not be written.
        """
        self._send()
        self.settle()

    def _send(self) -> None:
        """Start to bring the digests to the host, in one transfer, and have the lines written when they are there."""
        self.settle()
        start = time.perf_counter()
        with self.unseen():
            lines, sent = self._lines, self.digester.send()
        self._lines = []
        self._recent.clear()
        self.unwritten.clear()
        if sent.complete:
            self._finish(lines, sent)
        else:
            self._writer = self._writer or ThreadPoolExecutor(1, "trace")
            self._writing = self._writer.submit(self._finish, lines, sent)
        self.work.seconds += time.perf_counter() - start

    def _finish(self, lines: _Lines, sent: Sent) -> None:
        sent.wait()
        start = time.perf_counter()
        raw = _filled(lines, sent)
        if raw:
            self._write(raw)
        self.work.writing_s += time.perf_counter() - start

    def settle(self) -> None:
        """Wait until what was sent is written.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
