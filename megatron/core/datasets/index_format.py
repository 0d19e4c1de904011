"""The .idx file: what a .bin file of tokens holds and where.

Little endian, without gaps:

==========  ==============================================================
bytes       content
==========  ==============================================================
9           ``MMIDIDX`` and two NULs
8           u64 version, 1
1           u8 code of the token type
8           u64 number of sequences S
8           u64 number of document borders D (documents + 1)
4 S         i32 tokens of each sequence
8 S         i64 byte offset of each sequence in the .bin file
8 D         i64 document borders as sequence numbers: first 0, last S
==========  ==============================================================
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.errors import DamagedInputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
# Sequences looked at together while an index is checked; bounds the memory of the check.
_CHECK_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SequenceIndex:
    """Content of an .idx file.

    ``lengths`` int32 [S] tokens, ``pointers`` int64 [S] bytes, ``documents`` int64 [D] sequence numbers; they are
    views of the mapped file and cannot be written.
    """

    dtype: np.dtype
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    num_tokens: int


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Type of the tokens in a .bin file: uint16 below 65,500 ids, else int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def read_index(idx: Path, bin_size: int) -> SequenceIndex:
    """Read and check an .idx file against itself and against the size in bytes of its .bin file.

    Raises:
        DamagedInputError: a foreign file, a version or token type that is not known, a truncated or overlong index, a
            negative length, offsets that do not follow from the lengths, document borders out of order, or a .bin
            file of another size. The message names the file and what is wrong.
    """
    size = idx.stat().st_size
    if size < _HEADER.size:
        raise _damaged(idx, f"truncated: {size} bytes, the header alone has {_HEADER.size}")
    with idx.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, version, code, sequences, borders = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise _damaged(idx, f"foreign: starts with {magic!r} instead of {MAGIC!r}; is it a .bin file, or swapped?")
    if version != VERSION:
        raise _damaged(idx, f"version {version}, only version {VERSION} is known")
    if code not in _CODES:
        raise _damaged(idx, f"token type code {code}, known are {', '.join(map(str, sorted(_CODES)))}")
    dtype = np.dtype(_CODES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise _damaged(idx, f"holds {dtype.name} values: floating-point data are not token ids")
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if size == expected + sequences and sequences:
        raise _damaged(idx, "holds a mode for each sequence: multimodal data, only text is trained here")
    if size != expected:
        word = "truncated" if size < expected else "overlong"
        raise _damaged(
            idx, f"{word}: {size} bytes, {sequences} sequences and {borders} document borders need {expected}"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", borders, _HEADER.size + 12 * sequences)
    end = _checked_end(idx, lengths, pointers, dtype.itemsize)
    _check_borders(idx, documents, sequences)
    if bin_size != end:
        raise _damaged(
            idx.with_suffix(".bin"),
            f"{'truncated' if bin_size < end else 'overlong'}: {bin_size} bytes, {idx} describes {end}; "
            "are the two of different data sets?",
        )
    return SequenceIndex(
        dtype=dtype, lengths=lengths, pointers=pointers, documents=documents, num_tokens=end // dtype.itemsize
    )


def write_index(
    file: BinaryIO, dtype: type[np.generic] | np.dtype, lengths: NDArray[np.int32], documents: NDArray[np.int64]
) -> None:
    """Write an .idx file for sequences that follow each other in the .bin file. Offsets are summed in 64 bits."""
    code = next(code for code, known in _CODES.items() if np.dtype(known) == np.dtype(dtype))
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
    file.write(lengths.astype("<i4").tobytes())
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = (ends - lengths) * np.int64(np.dtype(dtype).itemsize)
    file.write(starts.astype("<i8").tobytes())
    file.write(documents.astype("<i8").tobytes())


def _damaged(path: Path, wrong: str) -> DamagedInputError:
    return DamagedInputError(f"{path}: {wrong}")


def _checked_end(idx: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int) -> int:
    """Size in bytes that the .bin file must have, after checking every length and offset."""
    end = 0
    for start in range(0, len(lengths), _CHECK_BLOCK):
        block = lengths[start : start + _CHECK_BLOCK].astype(np.int64)
        if block.min() < 0:
            wrong = start + int(np.argmax(block < 0))
            raise _damaged(idx, f"sequence {wrong} has the length {lengths[wrong]}")
        ends = end + np.cumsum(block) * itemsize
        differs = pointers[start : start + _CHECK_BLOCK] != ends - block * itemsize
        if differs.any():
            at = int(np.argmax(differs))
            raise _damaged(
                idx,
                f"sequence {start + at} starts at byte {pointers[start + at]}, the lengths before it add up to "
                f"{int(ends[at] - block[at] * itemsize)}",
            )
        end = int(ends[-1])
    return end


def _check_borders(idx: Path, documents: NDArray[np.int64], sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        shown = "none" if len(documents) == 0 else f"{documents[0]}..{documents[-1]}"
        raise _damaged(idx, f"document borders are {shown}, they must run from 0 to the {sequences} sequences")
    backwards = np.diff(documents) < 0
    if backwards.any():
        at = int(np.argmax(backwards))
        raise _damaged(idx, f"document border {at + 1} ({documents[at + 1]}) lies before border {at} ({documents[at]})")
