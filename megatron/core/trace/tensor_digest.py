"""Digests of a tensor's logical elements, made on its device without waiting for it.

A digest is 128 bits: two wrapping int64 sums over 8-byte words, each word mixed with its position. Sums of integers
are exact in any order. Gaps between strided elements are not read, so padding cannot show. Host tensors are digested by
NumPy, whose calls cost less; both give the same numbers.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy
import torch

CHUNKS = 16
"""Most runs of rows that get a digest of their own."""

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


_POSITION = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND, _ROW = (_signed(m) for m in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93))

Digest: TypeAlias = torch.Tensor | list[int]
"""Numbers on a device, or already here."""

Words: TypeAlias = Any
"""int64 words: a NumPy array on the host, a tensor elsewhere; the same operators mean the same on both."""


def _words(tensor: torch.Tensor, rows: int) -> Words:
    """The tensor's bytes in row-major order as ``[rows, words]`` int64; short rows are filled with zeros."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).view(rows, flat.numel() * flat.element_size() // rows)
    missing = -raw.shape[1] % 8
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing))
    if raw.device.type == "cpu":
        return raw.numpy().view(numpy.int64)
    if raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _mix(x: Words, multiplier: int) -> Words:
    x = x * multiplier
    return x ^ (x >> 31)


class Digester:
    """Makes digests; keeps the position keys of the longest tensor so far, per device."""

    def __init__(self) -> None:
        self._positions: dict[torch.device, torch.Tensor] = {}
        self._on_host = numpy.zeros(0, dtype=numpy.int64)

    def _position(self, like: Words, count: int) -> Words:
        size = max(1024, 1 << (count - 1).bit_length())
        if isinstance(like, numpy.ndarray):
            if self._on_host.size < count:
                self._on_host = _mix(numpy.arange(size, dtype=numpy.int64) * _POSITION + _FIRST, _SECOND)
            return self._on_host[:count]
        known = self._positions.get(like.device)
        if known is None or known.numel() < count:
            known = _mix(torch.arange(size, dtype=torch.int64, device=like.device) * _POSITION + _FIRST, _SECOND)
            self._positions[like.device] = known
        return known[:count]

    def whole(self, tensor: torch.Tensor) -> Digest:
        """Two numbers over all elements in row-major order."""
        if tensor.numel() == 0:
            return [0, 0]
        words = _words(tensor, 1)[0]
        mixed = _mix(words ^ self._position(words, words.shape[0]), _FIRST)
        first, second = mixed.sum(), _mix(mixed, _SECOND).sum()
        return [int(first), int(second)] if isinstance(words, numpy.ndarray) else torch.stack((first, second))

    def by_row(self, tensor: torch.Tensor) -> Digest:
        """1 + n numbers: over the rows (dimension 0) without their order, then over n runs of rows with it."""
        if tensor.numel() == 0:
            return [0]
        count = tensor.shape[0]
        words = _words(tensor, count)
        row = _mix(words ^ self._position(words, words.shape[1]), _FIRST).sum(1)
        placed = _mix(row + self._position(words, count), _ROW)
        length = -(-count // CHUNKS)
        runs = [placed[start : start + length].sum() for start in range(0, count, length)]
        numbers = [_mix(row, _ROW).sum(), *runs]
        return [int(n) for n in numbers] if isinstance(words, numpy.ndarray) else torch.stack(numbers)


def hex64(value: int) -> str:
    """16 hex digits of a signed 64-bit integer."""
    return f"{value & _MASK64:016x}"
