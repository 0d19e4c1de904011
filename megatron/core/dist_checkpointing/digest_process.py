"""Processes that digest what another has read: threads would wait for one another, since NumPy's calls are short."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, digests_of

_LOOK_FOR_PARENT_S = 1.0

_Task = tuple[str, TensorFacts, int, int]
"""A tensor's key and facts; the first element that is in the memory, and how many there are."""


class DigesterLostError(Exception):
    """A digester was ended from outside. It says nothing of any file, and is no ``OSError`` therefore."""


class Digester(Protocol):
    """Digests what lies in its memory."""

    memory: mmap.mmap

    def start(self, key: str, facts: TensorFacts, first: int, numel: int) -> None:
        """Begin with the elements ``first ...`` that lie at the beginning of the memory; then ``wait``."""

    def wait(self) -> list[int]:
        """Their digest, as two integers. Until it is there the memory may not change."""

    def close(self) -> None:
        """It is not needed any more."""


class DigestHere:
    """In this process, while ``start`` is called."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self._found: list[int] = []

    def start(self, key: str, facts: TensorFacts, first: int, numel: int) -> None:
        """As ``Digester.start``."""
        self._found = _digest(torch.frombuffer(self.memory, dtype=torch.uint8), (key, facts, first, numel))

    def wait(self) -> list[int]:
        """As ``Digester.wait``."""
        return self._found

    def close(self) -> None:
        """As ``Digester.close``."""


class DigestProcess:
    """In a process of its own, in memory that both see. The process ends with ``close``, and when this one has ended.

    Make it before any thread is started: it is a fork.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.memory, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, key: str, facts: TensorFacts, first: int, numel: int) -> None:
        """As ``Digester.start``. Raises as ``wait``."""
        try:
            self._connection.send((key, facts, first, numel))
        except BrokenPipeError as error:
            raise self._ended() from error

    def wait(self) -> list[int]:
        """As ``Digester.wait``.

        Raises:
            DigesterLostError: something else has ended the process.
        """
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error

    def _ended(self) -> DigesterLostError:
        self._process.join()
        return DigesterLostError(
            f"a process that digests tensors was ended from outside (exit code {self._process.exitcode}; -9: for want "
            "of memory, perhaps)"
        )

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _serve(memory: mmap.mmap, connection: Connection, parent: int) -> None:
    # The process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    while os.getppid() == parent:
        if connection.poll(_LOOK_FOR_PARENT_S):
            connection.send(_digest(raw, connection.recv()))


def _digest(raw: torch.Tensor, task: _Task) -> list[int]:
    """Of elements that may cross borders of shards."""
    key, facts, first, numel = task
    values, end = raw[: numel * facts.torch_dtype.itemsize].view(facts.torch_dtype), first + numel
    edges = [first, *range(first - first % facts.shard_numel + facts.shard_numel, end, facts.shard_numel), end]
    pieces = (
        StoredPiece(key=key, facts=facts, begin=a, values=values[a - first : b - first])
        for a, b in itertools.pairwise(edges)
    )
    return digests_of(pieces)[key]
