"""Data without files: 100,000 documents that count up from 1 and end in the end-of-document token."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_DOCUMENTS = 100_000
_LONGEST = 4096
_SEED = 0


class MockDocuments:
    """Document i is 1, 2, 3, ... modulo the vocabulary, then ``eod``; lengths 1..4095 from NumPy's default generator.

    The same on every machine (and as Megatron's), for a given vocabulary and end-of-document id.
    """

    path: str | None = None
    name = "mock data"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        generator = np.random.default_rng(_SEED)
        self._lengths = generator.integers(1, _LONGEST, size=_DOCUMENTS, dtype=np.int32)

    def __len__(self) -> int:
        return _DOCUMENTS

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [100,000]: tokens of each document, ``eod`` included."""
        return self._lengths

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray:
        """int64 ids of a document from ``offset`` on; ``length`` of them, or all."""
        end = int(self._lengths[sequence])
        stop = end if length is None else offset + length
        if not 0 <= offset <= stop <= end:
            raise IndexError(f"mock document {sequence} has {end} tokens, asked {offset}..{stop}")
        ids = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == end and stop > offset:
            ids[-1] = self._eod
        return ids

    def document_of(self, sequence: int) -> int:
        """Each sequence is a document."""
        return sequence

    def content_digest(self) -> str:
        """SHA-256 of what the documents follow from."""
        return hashlib.sha256(
            f"mock {_DOCUMENTS} {_LONGEST} {_SEED} {self._vocab_size} {self._eod}".encode()
        ).hexdigest()
