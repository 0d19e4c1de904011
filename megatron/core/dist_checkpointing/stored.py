"""A checkpoint on the disk as one whole, whatever layout wrote it: read by one process, a range at a time."""

from __future__ import annotations

import bisect
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.facts import FACTS_FILE, Facts, file_problem, read_facts
from megatron.core.dist_checkpointing.flat_tensor import TensorFacts
from megatron.core.dist_checkpointing.folder import MARKER_FILE, find_checkpoint
from megatron.core.dist_checkpointing.reader import read_metadata
from megatron.core.dist_checkpointing.regular_file import kind_of
from megatron.core.dist_checkpointing.writer import METADATA_FILE, Place

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

AT_ONCE_BYTES = 1 << 21
"""Bytes of a tensor that a thread or process has in its hands."""
THREADS = min(32, os.cpu_count() or 1)
"""As many as there are cores; more than this one Python does not keep busy."""


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a folder of checkpoints.

    Raises:
        DamagedInputError: it is neither.
    """
    facts = folder / FACTS_FILE
    try:
        if facts.is_file():
            return folder
        if not folder.is_dir():
            raise DamagedInputError(f"{folder} is {kind_of(folder)}")
        found = find_checkpoint(folder)
        if found is None:
            raise DamagedInputError(f"{facts} is {kind_of(facts)}, and there is no {MARKER_FILE}")
    except OSError as error:
        raise DamagedInputError(f"{folder} cannot be read: {error}") from error
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``begin ... begin + numel`` of the flat tensor ``key``, which lie together in one entry."""

    key: str
    begin: int
    numel: int
    nbytes: int
    place: Place


class StoredCheckpoint:
    """One checkpoint folder, opened. Several threads may read from it.

    Raises:
        DamagedInputError: it is no checkpoint, or its ``metadata.json`` is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = checkpoint_in(folder)
        self.facts: Facts = read_facts(self.folder)
        self.entries = EntryReader(self.folder)
        self._metadata: Metadata | None = None
        self._spans: dict[str, list[Span]] = {}

    def tensor(self, key: str) -> TensorFacts:
        """What is known of one tensor."""
        return TensorFacts.stated(self.facts["tensors"][key])

    def spans(self, key: str) -> list[Span]:
        """The stored ranges of one tensor, ascending and without a gap.

        Raises:
            DamagedInputError: DCP's metadata are damaged, or ranges are missing in them.
        """
        if key not in self._spans:
            self._spans[key] = self._find_spans(key)
        return self._spans[key]

    def _find_spans(self, key: str) -> list[Span]:
        metadata = self._metadata = self._metadata or self._proven_metadata()
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise DamagedInputError(f"{self.folder / METADATA_FILE} has no tensor {key}")
        facts, spans, end = self.tensor(key), list[Span](), 0
        for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets[0]):
            place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if chunk.offsets[0] != end or place is None:
                break
            numel = chunk.sizes.numel()
            spans.append(Span(key, end, numel, numel * facts.torch_dtype.itemsize, place))
            end += numel
        if end != facts.numel:
            raise DamagedInputError(f"{self.folder / METADATA_FILE}: {key} is not there from element {end} on")
        return spans

    def _proven_metadata(self) -> Metadata:
        """DCP's metadata, whose bytes are the ones that were written: what else a pickle may hold is not looked at."""
        problem = file_problem(self.folder, METADATA_FILE, self.facts["files"][METADATA_FILE])
        if problem is not None:
            path = str(self.folder / METADATA_FILE)
            raise DamagedInputError(f"{path} is damaged{problem.removeprefix(path)}")
        return read_metadata(self.folder)

    def read(self, key: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill ``out``, flat and of the tensor's type, with its elements from ``start`` on.

        Raises:
            DamagedInputError: they cannot be read; or see ``spans``.
        """
        spans, end = self.spans(key), start + out.numel()
        for span in spans[bisect.bisect_right(spans, start, key=lambda span: span.begin) - 1 :]:
            if span.begin >= end:
                return
            first, last = max(start, span.begin), min(end, span.begin + span.numel)
            part = out[first - start : last - start]
            self.entries.read(span.place, part, first - span.begin, nbytes=span.nbytes)

    def values(self, key: str) -> torch.Tensor:
        """One tensor, flat."""
        facts = self.tensor(key)
        whole = torch.empty(facts.numel, dtype=facts.torch_dtype)
        self.read(key, whole)
        return whole


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """The results in the order of the items, of which a few a thread are taken up before they are asked for."""
    waiting: deque[Future[_Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 4 * THREADS:
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()


def lots(nbytes: int) -> Iterator[tuple[int, int]]:
    """(first, number) of the bytes that a thread takes in its hands, one lot after the other."""
    return ((begin, min(AT_ONCE_BYTES, nbytes - begin)) for begin in range(0, nbytes, AT_ONCE_BYTES))
