"""The first event that differs between two recordings, and whether this rank made the difference or received it."""

from __future__ import annotations

import pytest

from megatron.core.trace.format import Event, Seen, encode_line
from megatron.training.loop.recorded import first_mismatch
from tests.support.traces import encode_event

SEGMENT = encode_line({"segment": {"pass": "forward", "iteration": 4, "chunk": 0, "shard": 1, "microbatch": 2}})


def seen(digest: str, label: str = "") -> Seen:
    return Seen(label, "float32", (2,), None, digest)


def event(kind: str, name: str, ins: str, outs: str, args: str = "") -> bytes:
    return encode_event(Event(kind, "layers.0", name, 0, "forward", (seen(ins, "x"),), (seen(outs),), args))


PLAIN = [
    event("module", "forward", "1", "2"),
    event("collective", "all_gather", "2", "3"),
    event("module", "loss", "3", "4"),
]


def recording(**changes: bytes) -> bytes:
    return SEGMENT + b"".join(changes.get(f"n{n}", line) for n, line in enumerate(PLAIN))


@pytest.mark.parametrize(
    ("other", "what", "received"),
    [
        (recording(n0=event("module", "forward", "1", "9")), "output in forward of layers.0", False),
        (recording(n0=event("module", "forward", "9", "9")), "x in forward of layers.0", False),
        (recording(n1=event("collective", "all_gather", "2", "9")), "output in all_gather of layers.0", True),
        (recording(n1=event("collective", "all_gather", "9", "9")), "x in all_gather of layers.0", False),
        (recording(n2=event("module", "loss", "3", "4", args="1.0")), " and 1.0 in loss", False),
        (recording(n2=b""), "loss of layers.0 (forward, chunk 0, shard 1, microbatch 2), which happened in one", False),
        (recording() + PLAIN[0], "which happened in one computation only", False),
    ],
)
def test_first_difference(other: bytes, what: str, received: bool):
    mismatch = first_mismatch(recording(), other)
    assert mismatch is not None
    assert what in mismatch.what
    assert mismatch.received is received


def test_names_of_transfers_are_no_difference():
    other = recording(n1=event("collective", "all_gather", "2", "3", args="pp 0->1 #7"))
    assert first_mismatch(recording(), other) is None
    assert first_mismatch(recording(), recording()) is None
