"""The digest of a trace: 128 bits of a tensor's elements in row-major order; how words and places are mixed.

Words are 4 bytes, the last one filled with zeros; ``TILE`` of them are a tile. Each of the two lanes is the sum, modulo
2^64, of word * place key * tile key, all keys odd: integer sums are exact in any order, a change of one word always
shows, and two different contents agree by chance only, about once in 2^64 even where nothing but signs differs. Keys
hang on places in a tile and on tiles alone, so that a kernel makes none while it reads. Zeros add nothing: a digest
says nothing of a tensor's size, which traces hold besides.

``index`` and ``x`` may be tensors or NumPy arrays of int64.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Words: TypeAlias = Any
"""int64 words: a tensor or a NumPy array; the same operators mean the same on both."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


POSITION = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND, ROW = (_signed(m) for m in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93))
LOW = (1 << 32) - 1

TILE = 1024
"""Words of a tile."""

GROUP = 4
"""Consecutive tiles that fall into one slot."""


def mix(x: Words, multiplier: int) -> Words:
    """One round."""
    x = x * multiplier
    return x ^ (x >> 31)


def position_keys(index: Words) -> Words:
    """64 bits for each index."""
    return mix(index * POSITION + FIRST, SECOND)


def place_keys(place: Words) -> tuple[Words, Words]:
    """Odd 64-bit keys of both lanes for the places in a tile."""
    key = position_keys(place)
    return key | 1, mix(key, ROW) | 1


def tile_keys(tile: Words) -> tuple[Words, Words]:
    """Odd 32-bit keys of both lanes, below 2^32."""
    key = position_keys(tile - (1 << 32))
    return (key & LOW) | 1, ((key >> 32) & LOW) | 1
