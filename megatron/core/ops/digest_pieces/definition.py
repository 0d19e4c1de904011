"""The layout-free digest: which 128 bits stand for the elements of a tensor, however they are cut.

A tensor is made of logical shards, a shard of words: the bits of an element as one unsigned integer of up to 32 bits,
an 8-byte element as two words, low one first. Word i of a shard has two odd 32-bit keys, mixed from (name, shard, i) in
32-bit arithmetic, which a GPU does at full speed. The digest is, per lane, the sum of key * word over all words of all
shards modulo 2^64: any cut into pieces gives the same total, and a change of one word always gives another one. Of two
different contents the digests are equal by chance only, about once in 2^64 even where nothing but signs differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

HIGH, MIX_1, MIX_2, MIX_3 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B, 0xC2B2AE35
"""Odd multipliers; the first two rounds are those of Wellons' hash "lowbias32"."""
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_WORD_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 22}


def signed(value: int) -> int:
    """The low 64 bits of a number as a signed integer."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def shard_key(name: str, shard: int) -> tuple[int, int]:
    """Two signed 64-bit keys of a logical shard."""
    raw = hashlib.blake2b(f"{name}\0{shard}".encode(), digest_size=16).digest()
    return signed(int.from_bytes(raw[:8], "little")), signed(int.from_bytes(raw[8:], "little"))


def words_of(flat: torch.Tensor) -> torch.Tensor:
    """The words of a flat contiguous tensor, as a view."""
    return flat.detach().view(_WORD_OF_SIZE[flat.element_size()])


def words_per_element(dtype: torch.dtype) -> int:
    """1, or 2 for elements of 8 bytes."""
    return 2 if dtype.itemsize == 8 else 1


def _mixed(x: torch.Tensor, shift: int, multiplier: int) -> torch.Tensor:
    """One round on unsigned 32-bit numbers, which are held as int64."""
    return ((x ^ (x >> shift)) * multiplier) & _MASK32


def word_keys(start: int, count: int, key: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both keys of the words ``start ... start + count`` of the shard with this ``key``; int64 below 2^32."""
    parts = [(half >> shift) & _MASK32 for half in key for shift in (0, 32)]
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = (((index & _MASK32) ^ parts[0]) + (index >> 32) * HIGH) & _MASK32
    x = _mixed(_mixed(x, 16, MIX_1), 15, MIX_2)
    x = x ^ (x >> 16)
    y = _mixed((x + parts[1]) & _MASK32, 15, MIX_3)
    return (x ^ parts[2]) | 1, ((y ^ (y >> 16)) ^ parts[3]) | 1


def digest_of_words(words: Sequence[torch.Tensor], key: tuple[int, int], start: int) -> torch.Tensor:
    """int64 ``[len(words), 2]``: each of these tensors as the words ``start ...`` of the shard with this ``key``."""
    device = words[0].device
    size = _AT_ONCE[device.type]
    total = torch.zeros(len(words), 2, dtype=torch.int64, device=device)
    for at, parts in enumerate(zip(*(flat.split(size) for flat in words), strict=True)):
        keys = word_keys(start + at * size, parts[0].numel(), key, device)
        wide = [part.to(torch.int64) & ((1 << 8 * part.element_size()) - 1) for part in parts]
        total += torch.stack([(lane * part).sum() for part in wide for lane in keys]).view(-1, 2)
    return total


def layout_free_digest(values: torch.Tensor, name: str, shard: int, start: int = 0) -> torch.Tensor:
    """Digest of a piece of one logical shard: int64 ``[2]``, to be summed (wrapping) over all pieces and shards.

    ``values`` is 1-D and holds elements ``start ...`` of the shard.
    """
    flat = values.detach().contiguous()
    key, first = shard_key(name, shard), start * words_per_element(flat.dtype)
    return digest_of_words([words_of(flat)], key, first)[0]
