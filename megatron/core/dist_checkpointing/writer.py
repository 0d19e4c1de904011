"""The writing end of PyTorch DCP's storage: this rank's files, synced, each with its size and SHA-256.

A rank with much to write cuts its entries into several files and writes them side by side: one thread copies, hashes
and writes more slowly than a good disk takes. The cut depends on sizes alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron.core.dist_checkpointing.folder import naming, write_all, write_synced
from megatron.core.dist_checkpointing.progress import SlowProgress

METADATA_FILE = ".metadata"
MAX_FILES = 8
FILE_BYTES = 1 << 28
"""A rank writes one file per this many bytes, up to ``MAX_FILES``."""
WRITE_BACK_BYTES = 1 << 26

Place = filesystem._StorageInfo
"""Where DCP's file system storage finds an entry: file, offset, length."""


class HashingFile(io.RawIOBase):
    """A file that is written once from start to end; knows how many bytes and which SHA-256 went in.

    The disk gets what was written while more is coming, so that ``finish`` has little to wait for.

    An error of the disk is kept and raised by ``finish``: raised from inside ``torch.save`` it would end in an abort of
    its archive writer. After the first error nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.size, self._on_its_way = path, 0, 0
        self._error: OSError | None = None
        self._hash = hashlib.sha256()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def writable(self) -> bool:
        """As for any file that is written."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                write_all(self._handle, view, self.path)
            except OSError as error:
                self._error = error
        self._hash.update(view)
        self.size += len(view)
        if self.size - self._on_its_way >= WRITE_BACK_BYTES:
            self._write_back()
        return len(view)

    def _write_back(self) -> None:
        """Make the kernel begin to write its dirty pages, by the advice that they will not be read soon. Where that is
        not heeded nothing is lost."""
        length = self.size - self._on_its_way
        if self._error is None and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle, self._on_its_way, length, os.POSIX_FADV_DONTNEED)
        self._on_its_way = self.size

    @property
    def failed(self) -> bool:
        """True once the disk has refused a write."""
        return self._error is not None

    def finish(self) -> dict[str, Any]:
        """Bring the file to the disk and return size and SHA-256.

        Raises:
            OSError: this or a write failed; names the file.
        """
        if self._error is not None:
            raise self._error
        with naming(self.path):
            os.fsync(self._handle)
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        """Close the file, once."""
        if not self.closed:
            os.close(self._handle)
        super().close()


class RankWriter(StorageWriter):
    """Writes ``__RANK_0.distcp``, ``__RANK_1.distcp``, ..., and on the coordinating rank ``.metadata``.

    ``files`` holds size and SHA-256 of what this rank has written. Every entry is one ``torch.save`` of a tensor, which
    is what DCP's own reader expects. Nothing random is written: equal states give equal bytes.

    Args:
        folder: an empty folder that exists.
        rank: this rank.
        progress: told the bytes of each entry that is written.
    """

    def __init__(self, folder: Path, rank: int, progress: SlowProgress) -> None:
        self.folder, self.rank = folder, rank
        self.files: dict[str, dict[str, Any]] = {}
        self._progress = progress

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """As ``StorageWriter.reset``."""
        self.files.clear()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As ``StorageWriter.set_up_storage_writer``."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As ``StorageWriter.prepare_local_plan``."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As ``StorageWriter.prepare_global_plan``."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's entries; no file where there are none."""
        files = cut_items(plan.items)
        names = [f"__{self.rank}_{number}.distcp" for number in range(len(files))]
        with ThreadPoolExecutor(max(1, len(files)), thread_name_prefix="checkpoint-file") as pool:
            written = list(pool.map(lambda name, items: self._write_file(name, items, planner), names, files))
        self.files.update(zip(names, (facts for _, facts in written), strict=True))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results, _ in written for result in results])
        return future

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[list[WriteResult], dict[str, Any]]:
        results: list[WriteResult] = []
        with HashingFile(self.folder / name) as file:
            for item in items:
                if not file.failed:
                    results.append(_write_item(file, name, item, planner))
                    self._progress.add(results[-1].size_in_bytes)
            return results, file.finish()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``: where each entry lies."""
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        raw = pickle.dumps(metadata, protocol=4)
        write_synced(self.folder / METADATA_FILE, raw)
        self.files[METADATA_FILE] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """As ``StorageWriter.validate_checkpoint_id``."""
        return True


def cut_items(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The entries in order, cut into as many files as their bytes call for, about equally large."""
    sizes = [_bytes_of(item) for item in items]
    total = sum(sizes)
    count = min(MAX_FILES, -(-total // FILE_BYTES)) or min(1, len(items))
    files: list[list[WriteItem]] = [[] for _ in range(count)]
    start = 0
    for item, size in zip(items, sizes, strict=True):
        files[min(count - 1, start * count // max(1, total))].append(item)
        start += size
    return [file for file in files if file]


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _write_item(file: HashingFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    start = file.size
    values = planner.resolve_data(item)
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{item.index.fqn} is not a tensor")
    # torch.save takes the whole storage behind a view: a NumPy array of the same memory has no more than it shows.
    torch.save(torch.from_numpy(values.detach().cpu().numpy()), file)
    length = file.size - start
    place = Place(relative_path=name, offset=start, length=length)
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
