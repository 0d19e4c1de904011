"""One stored tensor: where its values lie in the archive ``torch.save`` made of it, and reading them to their place.

An entry is a zip archive whose record ``data/0`` is the values. Nothing else of it is read, and nothing is unpickled:
type and shape are in DCP's metadata, and digests prove the values.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.regular_file import NoFileError, open_regular
from megatron.core.dist_checkpointing.writer import Place

CHUNK = 1 << 24
"""Bytes that are in flight between file and tensor: they stay in the processor's cache."""

_VALUES = "/data/0"
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record: the lengths of its name and of what follows it; then come its bytes."""


class _Region(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        # First what may fail: zipfile's buffer must not be freed with a view of it in a traceback.
        self._file.seek(self._start + self._at)
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        got = self._file.readinto(wanted)
        self._at += got
        return got


class EntryReader:
    """Reads entries of a checkpoint folder; several threads may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = threading.local()
        self._found: dict[tuple[str, int, int], tuple[int, int]] = {}

    def read(self, place: Place, out: torch.Tensor, start: int = 0, *, nbytes: int | None = None) -> None:
        """Fill ``out``, flat and contiguous, with values from element ``start`` on. With ``nbytes`` there have to be so
        many bytes of values in all.

        Raises:
            DamagedInputError: the file is missing or too short, or has no such values there; names it.
        """
        with self._opened(place) as file:
            first = start * out.element_size()
            begin, length = self._values_in(file, place, nbytes)
            if first + out.nbytes > length:
                raise ValueError(f"{length} bytes of values, {first + out.nbytes} were expected")
            file.seek(begin + first)
            self._fill(file, out.view(torch.uint8))

    def locate(self, place: Place, nbytes: int) -> int:
        """Where in the file the values begin, of which there have to be so many bytes.

        Raises:
            DamagedInputError: as ``read``.
        """
        with self._opened(place) as file:
            return self._values_in(file, place, nbytes)[0]

    @contextlib.contextmanager
    def _opened(self, place: Place) -> Iterator[io.FileIO]:
        path = self._folder / place.relative_path
        try:
            with open_regular(path) as file:
                yield file
        except FileNotFoundError as error:
            raise DamagedInputError(f"{path}: no such file") from error
        except NoFileError as error:
            raise DamagedInputError(f"{path} cannot be read: {error}") from error
        except (OSError, ValueError, KeyError, OverflowError, RuntimeError, zipfile.BadZipFile, struct.error) as error:
            raise DamagedInputError(f"{path} is damaged at byte {place.offset}: {error}") from error

    def _values_in(self, file: io.FileIO, place: Place, nbytes: int | None) -> tuple[int, int]:
        """First byte of the values in the file, and how many there are; looked for once."""
        key = (place.relative_path, place.offset, place.length)
        if key not in self._found:
            self._found[key] = _values_of(file, place)
        begin, length = self._found[key]
        if nbytes not in (None, length):
            raise ValueError(f"{length} bytes of values, {nbytes} were expected")
        return begin, length

    def _fill(self, file: io.FileIO, out: torch.Tensor) -> None:
        if not out.is_cuda:
            read_all(file, memoryview(out.numpy()))
            return
        buffer = self._buffer()
        for piece in out.split(CHUNK):
            held = buffer[: piece.numel()]
            read_all(file, memoryview(held.numpy()))
            piece.copy_(held)

    def _buffer(self) -> torch.Tensor:
        """This thread's, in memory that a GPU reads by itself."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        return self._own.buffer


def _values_of(file: io.FileIO, place: Place) -> tuple[int, int]:
    """First byte of the values in the file, and how many there are."""
    region = _Region(file, place.offset, place.length)
    with zipfile.ZipFile(region) as archive:
        records = [each for each in archive.infolist() if each.filename.endswith(_VALUES)]
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} records of values")
    record = records[0]
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its values are compressed")
    file.seek(place.offset + record.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    at = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    if at + record.file_size > place.length:
        raise ValueError("its values end behind it")
    return place.offset + at, record.file_size


def read_all(file: io.FileIO, into: memoryview) -> None:
    """Fill the memory from where the file stands.

    Raises:
        OSError, ValueError: it cannot be read, or ends before.
    """
    while into:
        got = file.readinto(into)
        if not got:
            raise ValueError(f"the file ends {len(into)} bytes early")
        into = into[got:]
