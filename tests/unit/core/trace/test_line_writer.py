"""LineWriter: lines wait for their digests in a thread, are written in order, and an error is raised once."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.core.trace.digest_queue import Promised, Queue, Sent
from megatron.core.trace.line_writer import LineWriter
from megatron.core.trace.reader import Note


class Arriving:
    """Stands for the event after which digests are on the host."""

    def __init__(self) -> None:
        self.here = threading.Event()

    def synchronize(self) -> None:
        assert self.here.wait(100)


def sent(arriving: Arriving) -> Sent:
    return Sent({Queue(torch.device("cpu"), 1): (torch.zeros(2, 0, dtype=torch.int64), arriving)})


def test_lines_are_written_in_order_when_their_digests_have_come():
    arriving, raw = Arriving(), []
    writer = LineWriter(raw.append)
    writer.start(["first"], sent(arriving))
    assert raw == []
    arriving.here.set()
    writer.start(["second"], Sent({}))
    assert raw == [b"first", b"second"]


def test_an_error_is_raised_once_by_whoever_comes_next():
    def full(raw: bytes) -> None:
        raise OSError("disk full")

    writer, arriving = LineWriter(full), Arriving()
    writer.start(["lost"], sent(arriving))
    arriving.here.set()
    with pytest.raises(OSError, match="disk full"):
        writer.settle()
    writer.settle()
    with pytest.raises(OSError, match="disk full"):
        writer.start(["at once"], Sent({}))


def test_a_promise_that_was_not_kept_is_an_error():
    with pytest.raises(RuntimeError, match="promised and not made"):
        LineWriter(lambda raw: None).start([[Note("", Promised())]], Sent({}))
