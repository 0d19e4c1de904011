"""Token files whose tokens say which document and position they are: a batch tells which samples it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, token_dtype


@dataclass(frozen=True, kw_only=True)
class SelfData:
    """A data set on disk. The token at position p of document d is ``d * stride + p``."""

    prefix: str
    lengths: tuple[int, ...]
    stride: int
    vocab_size: int

    def token(self, document: int, position: int) -> int:
        """The id written there."""
        return document * self.stride + position

    def place(self, token: int) -> tuple[int, int]:
        """(document, position) of an id."""
        return divmod(int(token), self.stride)


def write_self_data(folder: Path, lengths: Sequence[int], *, name: str = "self", vocab_size: int = 65536) -> SelfData:
    """Write documents of the given lengths as ``folder/name.bin`` and ``.idx``.

    Raises:
        ValueError: the vocabulary is too small to give every position an id of its own.
    """
    stride = max(lengths)
    if len(lengths) * stride > vocab_size:
        raise ValueError(f"{len(lengths)} documents of up to {stride} tokens need {len(lengths) * stride} ids")
    data = SelfData(prefix=str(folder / name), lengths=tuple(lengths), stride=stride, vocab_size=vocab_size)
    write_documents(data.prefix, (np.arange(n) + d * stride for d, n in enumerate(lengths)), vocab_size=vocab_size)
    return data


def write_documents(prefix: str, documents: Iterable[np.ndarray | Sequence[int]], *, vocab_size: int = 65536) -> None:
    """Write documents of one sequence each; an empty one has no sequence."""
    with IndexedDatasetBuilder(prefix, token_dtype(vocab_size)) as builder:
        for document in documents:
            builder.add_document(document, [len(document)] if len(document) else [])
        builder.finalize()
