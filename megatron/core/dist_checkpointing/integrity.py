"""Is every file of a checkpoint the one that was written, and every tensor the one that was saved?

Every file is read once, from start to end, by a thread that hashes it; what it has read of a tensor's values a process
digests meanwhile. Digests are sums, the same in whatever order these are done. Memory holds ``AT_ONCE_BYTES`` for each
digester, two a thread, whatever the sizes of files and tensors.
"""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import digest_hex
from megatron.core.dist_checkpointing.digest_process import Digester, DigestHere, DigestProcess
from megatron.core.dist_checkpointing.entry import read_all
from megatron.core.dist_checkpointing.facts import FACTS_FILE, unlike_stated
from megatron.core.dist_checkpointing.flat_tensor import add_digests
from megatron.core.dist_checkpointing.progress import SlowProgress
from megatron.core.dist_checkpointing.regular_file import open_regular
from megatron.core.dist_checkpointing.stored import AT_ONCE_BYTES, THREADS, Span, StoredCheckpoint, lots

SMALL_BYTES = 1 << 26
"""Tensors of less in all are digested sooner than processes start."""


def problems_of(stored: StoredCheckpoint, progress: SlowProgress) -> tuple[dict[str, str], dict[str, str]]:
    """What is wrong with which file, by name, and with which tensor, in the order of ``metadata.json``; both are empty
    where every byte is the one that was written. ``progress`` is told the bytes of files."""
    files, tensors, by_file = stored.facts["files"], dict[str, str](), dict[str, list[Span]]()
    for key in stored.facts["tensors"]:
        try:
            for span in stored.spans(key):
                by_file.setdefault(span.place.relative_path, []).append(span)
        except DamagedInputError as error:
            tensors[key] = str(error)
    found = _check_all(stored, {name: by_file.get(name, []) for name in sorted({*files, *by_file})}, progress)
    extra = sorted({path.name for path in stored.folder.iterdir()} - {*files, FACTS_FILE})
    problems = {name: of.problem for name, of in found.items() if of.problem is not None}
    problems |= {name: f"{stored.folder / name}: not part of the checkpoint" for name in extra}
    for (key, _), reason in sorted((place, reason) for of in found.values() for place, reason in of.unread.items()):
        tensors.setdefault(key, reason)
    digests = add_digests(of.digests for of in found.values())
    for key, stated in stored.facts["tensors"].items():
        if digests.get(key, digest_hex((0, 0))) != stated["digest"]:
            tensors.setdefault(key, "not the values that were saved")
    return problems, {key: tensors[key] for key in stored.facts["tensors"] if key in tensors}


@dataclass(slots=True)
class _Found:
    """What is known of one file: what is wrong with it, digests of what it holds of tensors, and why the range of a
    tensor that begins at an element could not be read."""

    problem: str | None = None
    digests: dict[str, list[int]] = field(default_factory=dict)
    unread: dict[tuple[str, int], str] = field(default_factory=dict)


def _check_all(stored: StoredCheckpoint, files: dict[str, list[Span]], progress: SlowProgress) -> dict[str, _Found]:
    # A digest takes twice as long as a hash.
    at_once = max(1, min(THREADS // 2, len(files)))
    small = sum(span.nbytes for holds in files.values() for span in holds) < SMALL_BYTES
    digesters: list[Digester] = [(DigestHere if small else DigestProcess)(AT_ONCE_BYTES) for _ in range(2 * at_once)]
    pairs: queue.SimpleQueue[tuple[Digester, Digester]] = queue.SimpleQueue()
    for pair in zip(digesters[::2], digesters[1::2], strict=True):
        pairs.put(pair)
    stop = threading.Event()

    def check(file: tuple[str, list[Span]]) -> _Found:
        pair = pairs.get()
        try:
            return _FileCheck(stored, *file, pair, stop).found(progress)
        finally:
            pairs.put(pair)

    try:
        with ThreadPoolExecutor(at_once, thread_name_prefix="checkpoint-hash") as hashing:
            try:
                return dict(zip(files, hashing.map(check, files.items()), strict=True))
            finally:
                stop.set()
    finally:
        for digester in digesters:
            digester.close()


class _FileCheck:
    """One file, of which ``holds`` are of tensors, which these digest. Once ``stop`` is set, what is left is not
    read."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        name: str,
        holds: Sequence[Span],
        digesters: Sequence[Digester],
        stop: threading.Event,
    ) -> None:
        self._stored, self._holds, self._stop = stored, holds, stop
        self._path, self._stated = stored.folder / name, stored.facts["files"].get(name)
        self._hash, self._found = hashlib.sha256(), _Found()
        self._free, self._pending = [*digesters], deque[tuple[Digester, str]]()

    def found(self, progress: SlowProgress) -> _Found:
        """Read and hash all of it, and have digested what it holds of tensors."""
        values = self._locate()
        try:
            with open_regular(self._path) as file:
                size, at = os.fstat(file.fileno()).st_size, 0
                for begin, span in values:
                    self._read(file, at, begin, None, progress)
                    at = begin + span.nbytes
                    self._read(file, begin, at, span, progress)
                self._read(file, at, size, None, progress)
        except FileNotFoundError:
            self._found.problem = f"{self._path}: no such file"
        except OSError as error:
            self._found.problem = f"{self._path} cannot be read: {error}"
        while self._pending:
            self._finish_one()
        if self._stated is not None and self._found.problem is None:
            self._found.problem = unlike_stated(self._path, size, self._hash.hexdigest(), self._stated)
        return self._found

    def _locate(self) -> list[tuple[int, Span]]:
        """Where in the file the values of which ranges begin, ascending."""
        places = []
        for span in self._holds:
            try:
                places.append((self._stored.entries.locate(span.place, span.nbytes), span))
            except DamagedInputError as error:
                self._found.unread[span.key, span.begin] = str(error)
        return sorted(places, key=lambda place: place[0])

    def _read(self, file: io.FileIO, begin: int, end: int, span: Span | None, progress: SlowProgress) -> None:
        """Read and hash these bytes, and have them digested if they are values. A part of the file that cannot be read
        is no reason to leave out the rest."""
        file.seek(begin)
        for at, count in lots(end - begin):
            digester = self._take()
            raw = memoryview(digester.memory)[:count]
            try:
                read_all(file, raw)
            except (OSError, ValueError) as error:
                self._free.append(digester)
                self._found.problem = self._found.problem or f"{self._path} cannot be read: {error}"
                if span is not None:
                    where = f"{self._path} is damaged at byte {span.place.offset}"
                    self._found.unread[span.key, span.begin] = f"{where}: {error}"
                return
            if span is None:
                self._free.append(digester)
            else:
                facts = self._stored.tensor(span.key)
                itemsize = facts.torch_dtype.itemsize
                digester.start(span.key, facts, span.begin + at // itemsize, count // itemsize)
                self._pending.append((digester, span.key))
            self._hash.update(raw)
            progress.add(count)

    def _take(self) -> Digester:
        """A digester whose memory is free."""
        if self._stop.is_set():
            raise CancelledError
        if not self._free:
            self._finish_one()
        return self._free.pop()

    def _finish_one(self) -> None:
        digester, key = self._pending.popleft()
        total = self._found.digests.get(key, (0, 0))
        self._found.digests[key] = [a + b for a, b in zip(total, digester.wait(), strict=True)]
        self._free.append(digester)
