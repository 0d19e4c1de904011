"""The digest by NumPy is the one that is defined."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing.host_digest import digest_on_host
from megatron.core.ops.digest_pieces.definition import digest_of_words, shard_key, words_of

BLOCK = 1 << 16
KEY = shard_key("layer.weight", 3)


def words(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return words_of(raw.to(torch.uint8).view(dtype))


@pytest.mark.parametrize("start", [0, 5, BLOCK - 3, (1 << 32) - 70, (1 << 33) + 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_it_is_the_digest_of_the_definition(dtype: torch.dtype, start: int) -> None:
    """Also across borders of blocks, and where the index of a word takes more than 32 bits."""
    for count in (0, 1, 140, BLOCK + 7):
        both = [words(count, dtype, seed) for seed in (1, 2)]
        assert digest_on_host(both, KEY, start).tolist() == digest_of_words(both, KEY, start).tolist()


def test_the_key_of_the_shard_counts() -> None:
    one = [words(140, torch.float32, 1)]
    assert digest_on_host(one, KEY, 0).tolist() != digest_on_host(one, shard_key("layer.weight", 4), 0).tolist()
