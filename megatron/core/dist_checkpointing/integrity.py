"""Is every file of a checkpoint the one that was written, and every tensor the one that was saved?

Every file is read once, from start to end, by a thread that hashes it; what it has read of a tensor's values another
thread digests meanwhile. Digests are sums, the same in whatever order threads are done. Memory holds ``AT_ONCE_BYTES``
twice for each thread, whatever the sizes of files and tensors.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import digest_hex
from megatron.core.dist_checkpointing.entry import read_all
from megatron.core.dist_checkpointing.facts import FACTS_FILE, unlike_stated
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, add_digests, digests_of
from megatron.core.dist_checkpointing.progress import SlowProgress
from megatron.core.dist_checkpointing.regular_file import open_regular
from megatron.core.dist_checkpointing.stored import AT_ONCE_BYTES, THREADS, Span, StoredCheckpoint, lots

_OfTensor = tuple[str, Span]
"""A tensor's key, and a range of it."""
_Digests = dict[str, list[int]]


def problems_of(stored: StoredCheckpoint, progress: SlowProgress) -> tuple[dict[str, str], dict[str, str]]:
    """What is wrong with which file, by name, and with which tensor, in the order of ``metadata.json``; both are empty
    where every byte is the one that was written. ``progress`` is told the bytes of files."""
    files, tensors, by_file = stored.facts["files"], dict[str, str](), dict[str, list[_OfTensor]]()
    for key in stored.facts["tensors"]:
        try:
            for span in stored.spans(key):
                by_file.setdefault(span.place.relative_path, []).append((key, span))
        except DamagedInputError as error:
            tensors[key] = str(error)
    found = _check_all(stored, {name: by_file.get(name, []) for name in sorted({*files, *by_file})}, progress)
    extra = sorted({path.name for path in stored.folder.iterdir()} - {*files, FACTS_FILE})
    problems = {name: of.problem for name, of in found.items() if of.problem is not None}
    problems |= {name: f"{stored.folder / name}: not part of the checkpoint" for name in extra}
    for (key, _), reason in sorted((place, reason) for of in found.values() for place, reason in of.unread.items()):
        tensors.setdefault(key, reason)
    digests = add_digests(part for of in found.values() for part in of.digests)
    for key, stated in stored.facts["tensors"].items():
        if digests.get(key, digest_hex((0, 0))) != stated["digest"]:
            tensors.setdefault(key, "not the values that were saved")
    return problems, {key: tensors[key] for key in stored.facts["tensors"] if key in tensors}


@dataclass(slots=True)
class _Found:
    """What is known of one file: what is wrong with it, digests of what it holds of tensors, and why the range of a
    tensor that begins at an element could not be read."""

    problem: str | None = None
    digests: list[_Digests] = field(default_factory=list)
    unread: dict[tuple[str, int], str] = field(default_factory=dict)


def _check_all(
    stored: StoredCheckpoint, files: dict[str, list[_OfTensor]], progress: SlowProgress
) -> dict[str, _Found]:
    at_once = max(1, min(THREADS, len(files)))
    with (
        ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-digest") as digesting,
        ThreadPoolExecutor(at_once, thread_name_prefix="checkpoint-hash") as hashing,
    ):
        shared = _Shared(stored, progress, digesting, max(2, 2 * THREADS // at_once))
        try:
            found = hashing.map(lambda file: _FileCheck(shared, *file).found(), files.items())
            return dict(zip(files, found, strict=True))
        finally:
            shared.stop.set()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all files have in common. ``buffers`` is how many of them each may use."""

    stored: StoredCheckpoint
    progress: SlowProgress
    digesting: ThreadPoolExecutor
    buffers: int
    stop: threading.Event = field(default_factory=threading.Event)


class _FileCheck:
    """One file, read once."""

    def __init__(self, shared: _Shared, name: str, holds: Sequence[_OfTensor]) -> None:
        self._shared, self._name, self._holds = shared, name, holds
        self._path = shared.stored.folder / name
        self._hash, self._found = hashlib.sha256(), _Found()
        self._free: list[torch.Tensor] = []
        self._pending: deque[tuple[torch.Tensor, Future[_Digests]]] = deque()

    def found(self) -> _Found:
        """Read and hash all of it, and digest what it holds of tensors."""
        values = self._locate()
        try:
            with open_regular(self._path) as file:
                size, at = os.fstat(file.fileno()).st_size, 0
                for begin, of in values:
                    self._read(file, at, begin, None)
                    at = begin + self._nbytes(of)
                    self._read(file, begin, at, of)
                self._read(file, at, size, None)
        except FileNotFoundError:
            self._found.problem = f"{self._path}: no such file"
        except OSError as error:
            self._found.problem = f"{self._path} cannot be read: {error}"
        while self._pending:
            self._finish_one()
        stated = self._shared.stored.facts["files"].get(self._name)
        if stated is not None and self._found.problem is None:
            self._found.problem = unlike_stated(self._path, size, self._hash.hexdigest(), stated)
        return self._found

    def _locate(self) -> list[tuple[int, _OfTensor]]:
        """Where in the file the values of which ranges begin, ascending."""
        places = []
        for key, span in self._holds:
            try:
                places.append((self._shared.stored.entries.locate(span.place, self._nbytes((key, span))), (key, span)))
            except DamagedInputError as error:
                self._found.unread[key, span.begin] = str(error)
        return sorted(places, key=lambda place: place[0])

    def _nbytes(self, of: _OfTensor) -> int:
        return of[1].numel * self._shared.stored.tensor(of[0]).torch_dtype.itemsize

    def _read(self, file: io.FileIO, begin: int, end: int, of: _OfTensor | None) -> None:
        """Read and hash these bytes, and have them digested if they are values. A part of the file that cannot be read
        is no reason to leave out the rest."""
        try:
            file.seek(begin)
            for at, count in lots(end - begin):
                buffer = self._buffer()
                raw = memoryview(buffer.numpy())[:count]
                read_all(file, raw)
                if of is not None:
                    self._pending.append((buffer, self._shared.digesting.submit(self._digest, of, at, buffer[:count])))
                self._hash.update(raw)
                if of is None:
                    self._free.append(buffer)
                self._shared.progress.add(count)
        except (OSError, ValueError) as error:
            self._found.problem = self._found.problem or f"{self._path} cannot be read: {error}"
            if of is not None:
                key, span = of
                self._found.unread[key, span.begin] = f"{self._path} is damaged at byte {span.place.offset}: {error}"

    def _buffer(self) -> torch.Tensor:
        """One that nobody reads any more."""
        if self._shared.stop.is_set():
            raise CancelledError
        if len(self._pending) == self._shared.buffers:
            self._finish_one()
        return self._free.pop() if self._free else torch.empty(AT_ONCE_BYTES, dtype=torch.uint8)

    def _finish_one(self) -> None:
        buffer, digests = self._pending.popleft()
        self._found.digests.append(digests.result())
        self._free.append(buffer)

    def _digest(self, of: _OfTensor, begin: int, raw: torch.Tensor) -> _Digests:
        """Of values that begin at this byte of a range, which may cross borders of shards."""
        key, span = of
        facts = self._shared.stored.tensor(key)
        values, first = raw.view(facts.torch_dtype), span.begin + begin // facts.torch_dtype.itemsize
        end = first + values.numel()
        edges = [first, *range(first - first % facts.shard_numel + facts.shard_numel, end, facts.shard_numel), end]
        return digests_of(
            StoredPiece(key=key, facts=facts, begin=a, values=values[a - first : b - first])
            for a, b in itertools.pairwise(edges)
        )
