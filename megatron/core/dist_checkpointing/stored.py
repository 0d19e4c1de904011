"""A checkpoint on the disk as one whole, whatever layout wrote it: read by one process, a range at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.facts import FACTS_FILE, Facts, file_problem, read_facts
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, add_digests, digests_of
from megatron.core.dist_checkpointing.folder import find_checkpoint
from megatron.core.dist_checkpointing.reader import read_metadata
from megatron.core.dist_checkpointing.writer import METADATA_FILE


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a folder of checkpoints.

    Raises:
        DamagedInputError: it is neither.
    """
    try:
        if (folder / FACTS_FILE).is_file():
            return folder
    except OSError as error:
        raise DamagedInputError(f"{folder} cannot be read: {error}") from error
    found = find_checkpoint(folder) if folder.is_dir() else None
    if found is None:
        raise DamagedInputError(f"{folder} is not a checkpoint: it has no {FACTS_FILE}")
    return found


class StoredCheckpoint:
    """One checkpoint folder, opened.

    Raises:
        DamagedInputError: it is no checkpoint, or its ``metadata.json`` is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = checkpoint_in(folder)
        self.facts: Facts = read_facts(self.folder)
        self._entries = EntryReader(self.folder)
        self._metadata: Metadata | None = None

    def tensor(self, key: str) -> TensorFacts:
        """What is known of one tensor."""
        return TensorFacts.stated(self.facts["tensors"][key])

    def file_problems(self) -> dict[str, str]:
        """What is wrong with which file; empty where every byte is the one that was written."""
        stated = self.facts["files"]
        found = {name: file_problem(self.folder, name, of) for name, of in sorted(stated.items())}
        extra = {p.name for p in self.folder.iterdir()} - {*stated, FACTS_FILE}
        problems = {name: text for name, text in found.items() if text is not None}
        return problems | {name: f"{self.folder / name}: not part of the checkpoint" for name in sorted(extra)}

    def ranges(self, key: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of the stored ranges of one tensor, ascending and without a gap.

        Raises:
            DamagedInputError: ranges are missing, or cannot be read.
        """
        metadata = self._metadata = self._metadata or self._proven_metadata()
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise DamagedInputError(f"{self.folder / METADATA_FILE} has no tensor {key}")
        end = 0
        for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets[0]):
            begin = chunk.offsets[0]
            place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if begin != end or place is None:
                break
            values = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
            self._entries.read(place, values)
            yield begin, values
            end = begin + values.numel()
        if end != self.tensor(key).numel:
            raise DamagedInputError(f"{self.folder / METADATA_FILE}: {key} is not there from element {end} on")

    def _proven_metadata(self) -> Metadata:
        """DCP's metadata, whose bytes are the ones that were written: what else a pickle may hold is not looked at."""
        problem = file_problem(self.folder, METADATA_FILE, self.facts["files"][METADATA_FILE])
        if problem is not None:
            path = str(self.folder / METADATA_FILE)
            raise DamagedInputError(f"{path} is damaged{problem.removeprefix(path)}")
        return read_metadata(self.folder)

    def values(self, key: str) -> torch.Tensor:
        """One tensor, flat; while it is read, one range of it is held twice."""
        facts = self.tensor(key)
        whole = torch.empty(facts.numel, dtype=getattr(torch, facts.dtype))
        for begin, values in self.ranges(key):
            whole[begin : begin + len(values)] = values
        return whole

    def digest(self, key: str) -> str:
        """Layout-free digest of what is stored, in hex."""
        facts, total = self.tensor(key), []
        for begin, values in self.ranges(key):
            borders = range(
                begin - begin % facts.shard_numel + facts.shard_numel, begin + len(values), facts.shard_numel
            )
            edges = [begin, *borders, begin + len(values)]
            pieces = (
                StoredPiece(key=key, facts=facts, begin=a, values=values[a - begin : b - begin])
                for a, b in zip(edges, edges[1:], strict=False)
            )
            total.append(digests_of(pieces))
        return add_digests(total)[key]
