"""Samples of fixed length cut from documents laid end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets.gpt_indices import EXTRA_TOKENS, INDEX_NAMES, SampleIndices
from megatron.core.datasets.index_cache import CachedArrays
from megatron.core.datasets.indexed_dataset import TokenSource


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """How raw token ids become a training sample.

    ``vocab_size`` bounds the ids (``None``: not checked). ``pad`` is the id without loss, -1 for none. With
    ``eod_mask_loss`` a position whose input is ``eod`` has no loss.
    """

    sequence_length: int
    vocab_size: int | None
    eod: int
    pad: int
    eod_mask_loss: bool = False


class GPTDataset:
    """Sample i of a split. Documents are not kept apart: a sample runs across their borders.

    Every sample is full: the indices leave out the tokens after the last whole one.

    Args:
        source: the data set's sequences.
        indices: from ``build_indices``, by name, with their digests.
        rules: how ids become a sample.
    """

    def __init__(self, source: TokenSource, indices: CachedArrays, rules: SampleRules) -> None:
        self.source = source
        self.rules = rules
        self.indices = SampleIndices(**{name: indices.arrays[name] for name in INDEX_NAMES})
        self.index_digests: Mapping[str, str] = dict(indices.digests)

    def __len__(self) -> int:
        return len(self.indices.sample_index) - 1

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """``tokens``, ``labels``, ``position_ids`` int64 [s] and ``loss_mask`` float32 [s].

        Labels are the tokens one place on. The loss mask is 0 where the label is the pad id, and at end-of-document
        inputs if the rules say so, else 1. Pad ids become 0, which the embedding has a row for.

        Raises:
            IndexError: no such sample.
            DamagedInputError: an id outside the vocabulary; names it, the document and the data set.
        """
        rules = self.rules
        ids = self.raw(index).astype(np.int64)
        tokens, labels = ids[:-1].copy(), ids[1:].copy()
        loss_mask = np.ones(rules.sequence_length, np.float32)
        if rules.eod_mask_loss:
            loss_mask[tokens == rules.eod] = 0.0
        loss_mask[labels == rules.pad] = 0.0
        tokens[tokens == rules.pad] = 0
        labels[labels == rules.pad] = 0
        position_ids = np.arange(rules.sequence_length, dtype=np.int64)
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}

    def raw(self, index: int) -> NDArray:
        """The s + 1 ids of sample ``index`` as they are in the file.

        Raises:
            IndexError: no such sample.
            DamagedInputError: an id outside the vocabulary.
        """
        pieces = [self.source.get(*piece) for piece in self._pieces(index)]
        ids = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        assert len(ids) == self.rules.sequence_length + EXTRA_TOKENS
        if self.rules.vocab_size is not None and (ids.min() < 0 or ids.max() >= self.rules.vocab_size):
            raise self._out_of_vocabulary(index, self.rules.vocab_size)
        return ids

    def _pieces(self, index: int) -> list[tuple[int, int, int | None]]:
        """Sequence number, first token and number of tokens (``None``: to the end) of each piece of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.source.name}")
        row = int(self.indices.shuffle_index[index])
        (first, offset), (last, end) = self.indices.sample_index[row : row + 2].tolist()
        sequences = self.indices.document_index[first : last + 1].tolist()
        if first == last:
            return [(sequences[0], offset, end - offset + EXTRA_TOKENS)]
        middle: list[tuple[int, int, int | None]] = [(sequence, 0, None) for sequence in sequences[1:-1]]
        return [(sequences[0], offset, None), *middle, (sequences[-1], 0, end + EXTRA_TOKENS)]

    def _out_of_vocabulary(self, index: int, vocab_size: int) -> DamagedInputError:
        for sequence, offset, length in self._pieces(index):
            ids = self.source.get(sequence, offset, length)
            wrong = (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                at = int(np.argmax(wrong))
                return DamagedInputError(
                    f"{self.source.name}: token id {int(ids[at])} at position {offset + at} of document "
                    f"{self.source.document_of(sequence)} is outside the vocabulary of {vocab_size} ids; was the data "
                    "made with another tokenizer?"
                )
        raise AssertionError(f"sample {index} is within the vocabulary")
