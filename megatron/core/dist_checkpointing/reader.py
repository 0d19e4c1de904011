"""The reading end of PyTorch DCP's storage; it admits metadata and tensors only: no code runs from a checkpoint."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.progress import SlowProgress
from megatron.core.dist_checkpointing.regular_file import read_regular
from megatron.core.dist_checkpointing.writer import MAX_FILES, METADATA_FILE, Place

_CLASSES = (
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata._MEM_FORMAT_ENCODING,
    Place,
    torch.Size,
)
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.get,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Loads DCP's metadata classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which does not belong in DCP metadata")
        return _ADMITTED[module, name]


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of what is stored and where.

    Raises:
        DamagedInputError: the file is missing or damaged, or asks for anything but DCP's own classes; names it.
    """
    path = folder / METADATA_FILE
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_regular(path))).load()
    except FileNotFoundError as error:
        raise DamagedInputError(f"{path}: no such file") from error
    except OSError as error:
        raise DamagedInputError(f"{path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DamagedInputError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedInputError(f"{path} is not the metadata of a checkpoint")
    for place in metadata.storage_data.values():
        if not isinstance(place, Place) or Path(place.relative_path).name != place.relative_path:
            raise DamagedInputError(f"{path} names a file outside its folder")
    return metadata


class FolderReader(StorageReader):
    """Reads from a checkpoint folder.

    Args:
        folder: the checkpoint.
        progress: told the bytes that were read of each entry.

    Raises:
        DamagedInputError: see ``read_metadata``; here, because DCP would print the error with its traceback.
    """

    def __init__(self, folder: Path, progress: SlowProgress) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder)
        self._progress = progress
        self._entries = EntryReader(folder)
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """As ``StorageReader.reset``."""

    def read_metadata(self) -> Metadata:
        """As ``StorageReader.read_metadata``."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """As ``StorageReader.set_up_storage_reader``."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As ``StorageReader.prepare_local_plan``."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As ``StorageReader.prepare_global_plan``."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the wanted ranges of each stored entry to their places."""
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR or item.storage_index not in self._places:
                raise DamagedInputError(f"{self.folder / METADATA_FILE} does not say where {item.storage_index} is")
            wanted.setdefault(item.storage_index, []).append(item)
        in_order = sorted(wanted, key=lambda i: (self._places[i].relative_path, self._places[i].offset))
        with ThreadPoolExecutor(MAX_FILES, thread_name_prefix="checkpoint-entry") as pool:
            for _ in pool.map(lambda index: self._read_entry(index, wanted[index], planner), in_order):
                pass
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_entry(self, index: MetadataIndex, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read what is wanted of one entry."""
        for item in items:
            target = planner.resolve_tensor(item).detach()
            self._entries.read(self._places[index], target, item.storage_offsets[0])
            planner.commit_tensor(item, target)
            self._progress.add(target.nbytes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """As ``StorageReader.validate_checkpoint_id``."""
        return True
