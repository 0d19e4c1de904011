"""Mock data: the counting documents, whole and in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.mock import MockDocuments


def test_documents_count_up_and_end():
    source = MockDocuments(vocab_size=10, eod=9)
    assert len(source) == len(source.sequence_lengths) == 100_000
    # NumPy's default generator, seed 0: as Megatron's mock data.
    assert source.sequence_lengths[:3].tolist() == np.random.default_rng(0).integers(1, 4096, 3, np.int32).tolist()
    for i in (0, 1, int(source.sequence_lengths.argmin())):
        length = int(source.sequence_lengths[i])
        assert source.get(i).tolist() == [k % 10 for k in range(1, length)] + [9]
        assert source.get(i, length).tolist() == []
    assert source.sequence_lengths.min() == 1
    assert source.get(0, 3, 2).tolist() == [4, 5]
    with pytest.raises(IndexError):
        source.get(0, 0, 5000)


def test_digest_follows_the_vocabulary():
    assert MockDocuments(10, 9).content_digest() == MockDocuments(10, 9).content_digest()
    assert MockDocuments(10, 9).content_digest() != MockDocuments(11, 9).content_digest()
