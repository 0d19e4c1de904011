"""Sample indices on disk: written whole or not at all, checked each time they are read.

A cached set of arrays is, in one folder, ``STEM-description.txt``, ``STEM-NAME.npy`` for each array (names and content
as Megatron's) and ``STEM-checksums.json`` (ours), which is written last and makes the set complete.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem

logger = logging.getLogger(__name__)

_RECORDED = {"dtype", "shape", "sha256"}
"""What the checksum file says of each array."""


def array_digest(array: NDArray) -> str:
    """SHA-256, in hex, of the raw little-endian values of an array in C order; type and shape do not enter."""
    values = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
    return hashlib.sha256(values.data).hexdigest()


def cache_key(identity: Mapping[str, Any]) -> tuple[str, str]:
    """The text that identifies an index, and its MD5 in hex, which names the files (surface as Megatron's)."""
    description = json.dumps(identity, indent=4)
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest(), description


@dataclass(frozen=True, kw_only=True)
class CachedArrays:
    """Arrays by name, and the ``array_digest`` of each."""

    arrays: Mapping[str, NDArray]
    digests: Mapping[str, str]


def digested(arrays: Mapping[str, NDArray]) -> CachedArrays:
    """Arrays that were made in memory, with their digests."""
    return CachedArrays(arrays=arrays, digests={name: array_digest(array) for name, array in arrays.items()})


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One set of arrays in a cache folder.

    ``content`` is the digest of the data that the arrays index: the name of the files is made of paths only, and other
    data may have been written to the same path since.
    """

    folder: Path
    stem: str
    description: str
    content: str
    names: tuple[str, ...]

    def path(self, affix: str) -> Path:
        """File of this entry whose name ends in ``affix``."""
        return self.folder / f"{self.stem}-{affix}"

    def load(self) -> CachedArrays | None:
        """The arrays, mapped from disk and verified; ``None`` where there is no entry, or it is of other data.

        Raises:
            DamagedInputError: the entry is complete but a file of it is missing or altered; names the file.
        """
        checksums = self._read_checksums()
        if checksums is None or checksums["content"] != self.content:
            return None
        recorded = checksums["arrays"]
        arrays = {name: self._read_array(name, recorded[name]) for name in self.names}
        return CachedArrays(arrays=arrays, digests={name: recorded[name]["sha256"] for name in self.names})

    def load_or_build(self, build: Callable[[], Mapping[str, NDArray]]) -> CachedArrays:
        """The arrays from disk, or built and stored. A damaged entry is built again, with a warning that names it."""
        try:
            found = self.load()
        except DamagedInputError as error:
            logger.warning("index cache is damaged and built again: %s", error)
            found = None
        return found if found is not None else self.store(build())

    def store(self, arrays: Mapping[str, NDArray]) -> CachedArrays:
        """Write the entry; each file appears whole under its name, the checksums last."""
        made = digested(arrays)
        recorded = {
            name: {"dtype": array.dtype.str, "shape": list(array.shape), "sha256": made.digests[name]}
            for name, array in arrays.items()
        }
        # Until the new checksums are there, old ones must not vouch for a mixture of old and new files.
        self.path("checksums.json").unlink(missing_ok=True)
        _write_whole(self.path("description.txt"), lambda file: file.write(self.description.encode("utf-8")))
        for name, array in arrays.items():
            _write_whole(self.path(f"{name}.npy"), functools.partial(np.save, arr=array, allow_pickle=False))
        text = json.dumps({"content": self.content, "arrays": recorded}, indent=1)
        _write_whole(self.path("checksums.json"), lambda file: file.write(text.encode("utf-8")))
        return made

    def require_usable_folder(self) -> None:
        """Make the folder and see that a file can be written into it, unless the entry is there already.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        if self.path("checksums.json").is_file():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ConfigError(
                [
                    Problem(
                        f"{self.folder} for sample indices, which cannot be written ({error.strerror})",
                        "a folder that can be written, which all ranks of a machine see",
                        "--data-cache-path",
                    )
                ]
            ) from error

    def _read_checksums(self) -> dict[str, Any] | None:
        path = self.path("checksums.json")
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise DamagedInputError(f"{path}: not JSON: {error}") from error
        arrays = content.get("arrays") if isinstance(content, dict) and "content" in content else None
        listed = [arrays.get(name) if isinstance(arrays, dict) else None for name in self.names]
        if not all(isinstance(each, dict) and each.keys() >= _RECORDED for each in listed):
            raise DamagedInputError(f"{path}: does not list {', '.join(self.names)}")
        return content

    def _read_array(self, name: str, recorded: Mapping[str, Any]) -> NDArray:
        path = self.path(f"{name}.npy")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedInputError(f"{path}: cannot be read: {error}") from error
        if [array.dtype.str, list(array.shape)] != [recorded["dtype"], recorded["shape"]]:
            raise DamagedInputError(f"{path}: is {array.dtype.str} {array.shape}, its checksum file says otherwise")
        if array_digest(array) != recorded["sha256"]:
            raise DamagedInputError(f"{path}: its SHA-256 differs from the one written with it")
        return array


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp keeps the file to its owner; colleagues who share the cache must be able to read it.
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    finally:
        Path(beside).unlink(missing_ok=True)
