"""NumPy's digests are those of the definition, for tensors below and beyond what is digested at once."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.digest_rows.reference import digest_rows
from megatron.core.ops.digest_words.definition import TILE
from megatron.core.ops.digest_words.reference import digest_words
from megatron.core.trace import host_digest
from megatron.core.trace.tensor_words import row_words


@pytest.mark.parametrize(
    "words", [1, TILE - 1, TILE + 1, host_digest.TABLE_WORDS, host_digest.TABLE_WORDS + 1, 2 * host_digest.TABLE_WORDS]
)
def test_whole_tensors(words: int):
    tensor, out = torch.randn(words), torch.zeros(2, 1, dtype=torch.int64)
    digest_words([tensor], [1], out, 0)
    assert host_digest.whole(tensor) == out[:, 0].tolist()


@pytest.mark.parametrize(("rows", "width", "length"), [(1, 1, 1), (7, 5, 3), (33, 64, 3), (4, 65, 4)])
def test_rows(rows: int, width: int, length: int):
    words, runs = row_words(torch.randn(rows, width)), -(-rows // length)
    out = torch.zeros(2, runs, dtype=torch.int64)
    digest_rows(words, length, 1, out, 0)
    assert host_digest.by_row(words, length) == [int(out[0].sum()), *out[1].tolist()]
