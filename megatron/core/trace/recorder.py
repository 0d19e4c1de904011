"""Recorder: the events of one rank's steps, from probes to lines.

It talks to no other rank, draws no random number and, inside a step, does not wait for the device: digests stay there
until the step is over. A process that is killed loses the events of the step its device works on, and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.trace.dump import Dump
from megatron.core.trace.flatten import plain_arguments
from megatron.core.trace.line_writer import LineWriter
from megatron.core.trace.lines import Lines
from megatron.core.trace.reader import Note, Reader, unseen
from megatron.core.trace.scopes import Scopes


class Recorder:
    """One rank's recorder; ``active`` only inside traced steps.

    ``scopes`` knows where the step is, ``reader`` looks at tensors (``trusting`` as there), ``writer`` gives the lines
    of a step to ``write``. Where ``dump`` is given, arguments and results of the events it wants are kept too.
    """

    def __init__(self, write: Callable[[bytes], None], dump: Dump | None = None, *, trusting: bool = False) -> None:
        self.active, self.events = False, 0
        self.scopes, self.reader, self.writer = Scopes(), Reader(trusting=trusting), LineWriter(write)
        self._lines, self._dump = Lines(), dump
        self._counts: Counter[str] = Counter()

    def begin_step(self) -> None:
        """Start recording a step."""
        self.active = True
        self._counts.clear()
        self.scopes.begin_step()

    def end_step(self, iteration: int, *, complete: bool) -> None:
        """Stop recording and write what the step left; an incomplete one (an error ended it) gets no end line.

        Raises:
            OSError: the lines of this step or the one before could not be written.
        """
        self.active = False
        if complete:
            self._lines.end(iteration)
        self._send()
        if not complete:
            self.writer.settle()

    def segment(self, kind: str, iteration: int, **coordinates: int) -> None:
        """All that follows belongs to this part of the step, one of those that ``Scopes`` names."""
        self.scopes.part = kind
        self.reader.forget()
        self._lines.segment(kind, iteration, coordinates)

    def count(self, channel: str) -> int:
        """As ``Probe.count``."""
        self._counts[channel] += 1
        return self._counts[channel]

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
        """Record one event from notes taken before and after it; ``scope`` is where it happens, if not here."""
        place = self.scopes.here() if scope is None else scope, name, self.scopes.phase()
        self._lines.event(kind, place, ins, outs, args, meta)
        self.events += 1

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
        reader, scope = self.reader, self.scopes.here()
        before = reader.note(ins, rows=rows, flag=True, reuse=True)
        saved = self.save(kind, scope, name, ins)
        with self.scopes.inside(f"{scope}:{name}"):
            result = call()
        filled = result if outs is None else outs
        reader.unwritten.written(filled)
        after = reader.note(filled, "result" if outs is None else "", rows=rows)
        if saved is not None:
            with unseen():
                meta = {**(meta or {}), "dump": saved.finish(filled)}
        # The call may have added to the facts what it chose.
        self.event(kind, name, ins=before, outs=after, scope=scope, args=plain_arguments(ins), meta=meta)
        return result

    def save(self, kind: str, scope: str, name: str, arguments: Any) -> Any:
        """Keep the arguments of an event where they are wanted; ``finish(results)`` of what comes back completes it."""
        if self._dump is None or not self._dump.wants(scope, name):
            return None
        with unseen():
            return self._dump.begin(kind, scope, name, arguments)

    def flush(self) -> None:
        """Write all that was recorded; waits for the device.

        Raises:
            OSError: it could not be written.
        """
        self._send()
        self.writer.settle()

    def _send(self) -> None:
        """Start to bring the digests to the host, in one transfer, and have the lines written when they are there."""
        self.writer.start(self._lines.take(), self.reader.send())
