"""A process digests what lies in memory that both see, and does not outlive whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.digest_process import Digester, DigesterLostError, DigestHere, DigestProcess
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, digests_of
from tests.support.processes import ends, runs

ROOT = Path(__file__).resolve().parents[4]
FACTS = TensorFacts(dtype="float32", shape=(3, 500), shards=3, name="layer.weight")
LEFT_ALONE = """
import signal, sys
from megatron.core.dist_checkpointing.digest_process import DigestProcess
process = DigestProcess(4096)
print(process._process.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", [DigestHere, DigestProcess])
def test_any_range_has_the_digest_of_its_pieces(kind: type[Digester]) -> None:
    values = torch.randn(1500, generator=torch.Generator().manual_seed(1))
    process = kind(values.nbytes)
    for first, end in ((0, 1500), (0, 1), (400, 1100), (499, 500), (500, 1000)):
        process.memory[: 4 * (end - first)] = values[first:end].numpy().tobytes()
        process.start("main_params.layer.weight", FACTS, first, end - first)
        edges = [first, *(edge for edge in (500, 1000) if first < edge < end), end]
        pieces = [
            StoredPiece(key="key", facts=FACTS, begin=a, values=values[a:b])
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        assert torch.equal(torch.tensor(process.wait()), torch.tensor(digests_of(pieces)["key"]))
    process.close()


def test_an_interrupt_is_for_whoever_started_it() -> None:
    process = DigestProcess(4096)
    os.kill(process._process.pid, signal.SIGINT)
    process.start("key", FACTS, 0, 5)
    assert process.wait() == [0, 0]
    process.close()


def test_one_that_was_killed_is_an_error() -> None:
    process = DigestProcess(4096)
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.join()
    with pytest.raises(DigesterLostError, match="exit code -9"):
        process.start("key", FACTS, 0, 5)
        process.wait()
    process.close()


def test_it_ends_when_whoever_started_it_is_killed() -> None:
    command = [sys.executable, "-c", LEFT_ALONE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        process = int(starter.stdout.readline())
        assert runs(process)
        starter.kill()
    assert ends(process)
