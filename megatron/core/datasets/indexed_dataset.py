"""Token files: a .bin of raw tokens and the .idx that says where each sequence lies; the same bytes as Megatron's."""

from __future__ import annotations

import functools
import hashlib
import itertools
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets.index_format import read_index, token_dtype, write_index

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "TokenSource", "bin_path", "idx_path", "token_dtype"]

# Tokens of a .bin file looked at together.
_SCAN_TOKENS = 1 << 22
# Up to so many bytes a .bin file is digested whole; a larger one by blocks, since every rank digests every data set.
_READ_WHOLE, _BLOCKS, _BLOCK_BYTES = 1 << 20, 16, 1 << 12
# Documents kept as Python numbers by a builder before they become arrays, which hold a tenth of the memory.
_SETTLE_AT = 1 << 16


def bin_path(prefix: str) -> Path:
    """The token file of a data set."""
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    """The index file of a data set."""
    return Path(prefix + ".idx")


def missing_files(prefix: str) -> str | None:
    """Which of its two files a data set lacks, in words, with the name that may be meant, or what is there in the place
    of one; ``None``: it has both."""
    lacking = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if not lacking:
        return None
    for path in lacking:
        if path.exists():
            kind = "a directory" if path.is_dir() else "a FIFO" if path.is_fifo() else "a device or a socket"
            return f"{path}: it is {kind}, not a file; the data set {prefix} needs two files"
    missing = [str(path) for path in lacking]
    inside = (str(path.with_suffix("")) for path in sorted(Path(prefix).glob("*.idx")))
    others = itertools.chain(_other_spellings(prefix), inside)
    near = next((p for p in others if p != prefix and idx_path(p).is_file()), None)
    hint = f"; there is a data set {near}" if near else ""
    return f"{' and '.join(missing)}: no such file; the data set {prefix} needs both{hint}"


def _other_spellings(prefix: str) -> tuple[str, ...]:
    return prefix.removesuffix(".bin").removesuffix(".idx"), prefix + "_text_document"


class TokenSource(Protocol):
    """Sequences of tokens by number; what samples are cut from.

    ``name`` is what an error calls it, ``path`` what the names of cached indices are made of (``None``: never cached).
    """

    name: str
    path: str | None

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray:
        """``length`` tokens of a sequence from ``offset`` on; all that follow where ``length`` is ``None``."""

    def document_of(self, sequence: int) -> int:
        """Number of the document that a sequence belongs to."""

    def content_digest(self) -> str:
        """SHA-256, in hex, of what tells this content from another; the same wherever the files lie."""


class IndexedDataset:
    """Reads ``PREFIX.bin`` and ``PREFIX.idx``; both are checked against each other when it is opened.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        mmap_bin: map the .bin file; otherwise each read is a read call at an offset.

    Raises:
        DamagedInputError: a file is missing, foreign or damaged; see ``read_index``.
    """

    def __init__(self, prefix: str, *, mmap_bin: bool = True) -> None:
        self.path: str | None = prefix
        self.name = prefix
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        missing = missing_files(prefix)
        if missing is not None:
            raise DamagedInputError(missing)
        state = self._bin.stat()
        self._modified_ns = state.st_mtime_ns
        self._index = read_index(self._idx, state.st_size)
        self._file = self._bin.open("rb", buffering=0)
        self._tokens: NDArray | None = None
        if mmap_bin and self._index.num_tokens:
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self._tokens = np.frombuffer(mapped, self._index.dtype)

    def __len__(self) -> int:
        return len(self._index.lengths)

    def __getitem__(self, sequence: int) -> NDArray:
        return self.get(sequence)

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens."""
        return self._index.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens in the .bin file."""
        return self._index.num_tokens

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [S]: tokens of each sequence."""
        return self._index.lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: number of the first sequence of each document, then the number of sequences."""
        return self._index.documents

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray:
        """``length`` tokens of a sequence from ``offset`` on; all that follow where ``length`` is ``None``.

        Raises:
            IndexError: no such sequence, or it has fewer tokens.
            DamagedInputError: the .bin file has become shorter since it was opened.
        """
        available = int(self._index.lengths[sequence])
        length = available - offset if length is None else length
        if not (offset >= 0 and length >= 0 and offset + length <= available):
            raise IndexError(f"{self.name}: sequence {sequence} has {available} tokens, asked {offset}+{length}")
        start = int(self._index.pointers[sequence]) + offset * self.dtype.itemsize
        if self._tokens is not None:
            first = start // self.dtype.itemsize
            return self._tokens[first : first + length]
        wanted = length * self.dtype.itemsize
        content = os.pread(self._file.fileno(), wanted, start)
        while len(content) < wanted:
            more = os.pread(self._file.fileno(), wanted - len(content), start + len(content))
            if not more:
                raise DamagedInputError(f"{self._bin}: ends at byte {start + len(content)}, inside sequence {sequence}")
            content += more
        return np.frombuffer(content, self.dtype)

    def document_of(self, sequence: int) -> int:
        """Number of the document that a sequence belongs to."""
        return int(np.searchsorted(self._index.documents, sequence, side="right")) - 1

    def place_of(self, token: int) -> tuple[int, int]:
        """Sequence that holds a token of the .bin file, counted from 0, and the token's position in it."""
        sequence = int(np.searchsorted(self._index.pointers, token * self.dtype.itemsize, side="right")) - 1
        return sequence, token - int(self._index.pointers[sequence]) // self.dtype.itemsize

    def id_range(self) -> NDArray[np.int64]:
        """int64 [2, 2]: the least id and the number of the first token that has it, then the same of the largest id.
        Reads the whole .bin file; an empty one has no rows.

        Raises:
            DamagedInputError: its length has changed since it was opened.
        """
        rows: list[list[int]] = []
        start = 0
        with self._bin.open("rb") as file:
            while len(block := np.fromfile(file, self.dtype, _SCAN_TOKENS)):
                least, largest = int(block.min()), int(block.max())
                if not rows or least < rows[0][0]:
                    rows[:1] = [[least, start + int(block.argmin())]]
                if len(rows) < 2 or largest > rows[1][0]:
                    rows[1:] = [[largest, start + int(block.argmax())]]
                start += len(block)
        if start != self.num_tokens:
            raise DamagedInputError(f"{self._bin}: {start} tokens now, {self.num_tokens} when it was opened")
        return np.array(rows, np.int64).reshape(-1, 2)

    def file_digest(self) -> str:
        """SHA-256 over ``content_digest`` and the time the .bin file was last written: differs where the tokens do."""
        return hashlib.sha256(f"{self._digest} {self._modified_ns}".encode()).hexdigest()

    @functools.cached_property
    def _digest(self) -> str:
        size = self._bin.stat().st_size
        digest = hashlib.sha256(f"{size}\n".encode())
        with self._idx.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        for start, length in _sampled_blocks(size):
            digest.update(os.pread(self._file.fileno(), length, start))
        return digest.hexdigest()

    def content_digest(self) -> str:
        """SHA-256 over the size of the .bin file, the bytes of the .idx file and a sample of the tokens: all of a small
        file, of a large one 16 blocks of 4 KiB from its first to its last byte.

        Another text of equal lengths has another digest; what differs between the blocks only does not show.
        """
        return self._digest


def _sampled_blocks(size: int) -> list[tuple[int, int]]:
    """Start and length in bytes of the blocks that stand for a file of ``size`` bytes."""
    if size <= _READ_WHOLE:
        return [(0, size)]
    last = size - _BLOCK_BYTES
    return [(last * i // (_BLOCKS - 1), _BLOCK_BYTES) for i in range(_BLOCKS)]


class IndexedDatasetBuilder:
    """Writes a .bin file as documents come and the .idx file at the end.

    Both are written under another name and take their own in ``finalize``, the .idx last: a run that dies before
    leaves no data set. Used as a context manager, it removes what an error left unfinished.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        dtype: type of the tokens, see ``token_dtype``.
    """

    def __init__(self, prefix: str, dtype: type[np.integer] = np.int32) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._range = np.iinfo(dtype)
        self._partial_bin, self._partial_idx = bin_path(prefix + ".partial"), idx_path(prefix + ".partial")
        self._file = self._partial_bin.open("wb")
        self._lengths: list[NDArray[np.int32]] = []
        self._pending_lengths: list[int] = []
        self._num_sequences = 0
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._pending_documents: list[int] = []

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._partial_bin.unlink(missing_ok=True)
        self._partial_idx.unlink(missing_ok=True)

    def add_item(self, tokens: ArrayLike) -> None:
        """Append one sequence to the current document.

        Raises:
            ValueError: a token is no whole number, or does not fit the token type.
        """
        self._write(tokens)
        self._add_length(np.asarray(tokens).size)

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int]) -> None:
        """Append a whole document: its tokens, and the length of each of its sequences.

        Raises:
            ValueError: the lengths do not add up to the tokens; see ``add_item`` for the tokens.
        """
        if sum(lengths) != np.asarray(tokens).size:
            raise ValueError(f"lengths add up to {sum(lengths)}, the document has {np.asarray(tokens).size} tokens")
        self._write(tokens)
        for length in lengths:
            self._add_length(length)
        self.end_document()

    def end_document(self) -> None:
        """End the current document; one without sequences still counts."""
        self._pending_documents.append(self._num_sequences)
        if len(self._pending_documents) >= _SETTLE_AT:
            self._settle()

    def add_index(self, prefix: str) -> None:
        """Append a whole data set, as if its documents had been added one by one.

        Raises:
            DamagedInputError: the other data set is damaged.
            ValueError: its tokens are of another type.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self._dtype:
            raise ValueError(f"{prefix} holds {other.dtype.name} tokens, {self._prefix} {self._dtype.name}")
        self._settle()
        self._lengths.append(np.array(other.sequence_lengths))
        self._documents.append(other.document_indices[1:] + self._num_sequences)
        self._num_sequences += len(other)
        with bin_path(prefix).open("rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 22)

    def finalize(self) -> bool:
        """Write the index and give both files their names. Returns whether they took the place of others."""
        self._settle()
        with self._partial_idx.open("wb") as file:
            write_index(file, self._dtype, np.concatenate(self._lengths), np.concatenate(self._documents))
            file.flush()
            os.fsync(file.fileno())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        replaced = any(path.exists() for path in (bin_path(self._prefix), idx_path(self._prefix)))
        # The old index must not describe the new tokens, not even between two renames.
        idx_path(self._prefix).unlink(missing_ok=True)
        self._partial_bin.replace(bin_path(self._prefix))
        self._partial_idx.replace(idx_path(self._prefix))
        return replaced

    def _write(self, tokens: ArrayLike) -> None:
        array = np.asarray(tokens)
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"tokens of type {array.dtype.name}, which are no whole numbers that 64 bits hold")
        if array.size and (array.min() < self._range.min or array.max() > self._range.max):
            raise ValueError(f"tokens {array.min()}..{array.max()} do not fit {self._dtype.name}")
        self._file.write(array.astype(self._dtype).tobytes())

    def _add_length(self, length: int) -> None:
        if length > np.iinfo(np.int32).max:
            raise ValueError(f"a sequence of {length} tokens; the index holds lengths below 2^31")
        self._pending_lengths.append(length)
        self._num_sequences += 1

    def _settle(self) -> None:
        self._lengths.append(np.array(self._pending_lengths, np.int32))
        self._documents.append(np.array(self._pending_documents, np.int64))
        self._pending_lengths, self._pending_documents = [], []
