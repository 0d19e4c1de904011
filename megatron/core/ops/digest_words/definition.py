"""The digest of a trace: 128 bits of a tensor's elements in row-major order; how words and places are mixed.

Words are 8 bytes, the last one filled with zeros. The digest is two wrapping int64 sums over the words, each mixed with
its position; sums of integers are exact in any order. ``x`` may be a tensor or a NumPy array of int64.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Words: TypeAlias = Any
"""int64 words: a tensor or a NumPy array; the same operators mean the same on both."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


POSITION = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND, ROW = (_signed(m) for m in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93))

TILE = 1024
"""Consecutive words that fall into one slot."""


def mix(x: Words, multiplier: int) -> Words:
    """One round."""
    x = x * multiplier
    return x ^ (x >> 31)


def position_keys(index: Words) -> Words:
    """What the words at these places are mixed with."""
    return mix(index * POSITION + FIRST, SECOND)
