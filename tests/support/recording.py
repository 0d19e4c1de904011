"""A recorder whose events can be looked at, and a small module to be recorded."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from megatron.core.trace.dump import Dump
from megatron.core.trace.format import Event, decode_event
from megatron.core.trace.op_mode import OpMode
from megatron.core.trace.recorder import Recorder


class Lines:
    """Collects what a recorder writes."""

    def __init__(self) -> None:
        self.raw = b""

    def __call__(self, lines: bytes) -> None:
        self.raw += lines

    def events(self) -> list[Event]:
        return [decode_event(line) for line in self.raw.splitlines() if line.startswith(b'{"e"')]


def recorded(work: Callable[[Recorder], None], *, ops: bool = True, dump: Dump | None = None) -> list[Event]:
    """The events of ``work(recorder)`` in one forward segment."""
    lines = Lines()
    recorder = Recorder(lines, dump)
    recorder.begin_step()
    recorder.segment("forward", 1)
    if ops:
        with OpMode(recorder):
            work(recorder)
    else:
        work(recorder)
    recorder.end_step(1, complete=True)
    # Where digests come from a device the lines are written by another thread.
    recorder.writer.settle()
    assert json.loads(lines.raw.splitlines()[-1]) == {"end": 1, "events": len(lines.events())}
    return lines.events()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()
