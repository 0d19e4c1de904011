"""Layout-free digests of host memory by NumPy, several times as fast as their definition; the numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megatron.core.ops.digest_pieces.definition import HIGH, MIX_1, MIX_2, MIX_3, signed

_BLOCK = 1 << 16
"""Words that are digested at once: what is made of them stays in a core's cache, and the upper half of their indices
is one number."""
_PLACES = numpy.arange(_BLOCK, dtype=numpy.uint32)
_MASK32 = (1 << 32) - 1


def digest_on_host(words: Sequence[torch.Tensor], key: tuple[int, int], start: int) -> torch.Tensor:
    """``digest_of_words`` of flat tensors in host memory, all of one length: int64 ``[len(words), 2]``."""
    arrays = [of.numpy().view(f"u{of.element_size()}") for of in words]
    wide, lane = numpy.empty((2, _BLOCK), dtype=numpy.uint64)
    totals, keys, at, end = [[0, 0] for _ in arrays], _Keys(key), 0, words[0].numel()
    while at < end:
        count = min(end - at, _BLOCK - (start + at) % _BLOCK)
        both = keys.of(start + at, count)
        for total, array in zip(totals, arrays, strict=True):
            numpy.copyto(wide[:count], array[at : at + count])
            for i, one in enumerate(both):
                numpy.copyto(lane[:count], one)
                total[i] += int(numpy.dot(lane[:count], wide[:count]))
        at += count
    return torch.tensor([[signed(lane) for lane in total] for total in totals], dtype=torch.int64)


class _Keys:
    """Both keys of the words of one shard, a block at a time, in memory that the next block takes over."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._parts = [(half >> shift) & _MASK32 for half in key for shift in (0, 32)]
        self._x, self._y, self._shifted = (numpy.empty(_BLOCK, dtype=numpy.uint32) for _ in range(3))

    def of(self, index: int, count: int) -> tuple[Any, Any]:
        """Those of the words ``index ... index + count``, which lie in one block."""
        x, y, parts = self._x[:count], self._y[:count], self._parts
        place, upper = index % _BLOCK, index - index % _BLOCK
        places = _PLACES[place : place + count]
        high = (upper >> 32) * HIGH & _MASK32
        if high:
            numpy.bitwise_xor(places, numpy.uint32(upper & _MASK32 ^ parts[0]), out=x)
            numpy.add(x, numpy.uint32(high), out=x)
            self._mix(x, 16)
        else:
            # The first shift brings down what is the same for all words of the block.
            const = upper ^ parts[0]
            numpy.bitwise_xor(places, numpy.uint32(const ^ const >> 16), out=x)
        numpy.multiply(x, numpy.uint32(MIX_1), out=x)
        self._mix(x, 15)
        numpy.multiply(x, numpy.uint32(MIX_2), out=x)
        self._mix(x, 16)
        numpy.add(x, numpy.uint32(parts[1]), out=y)
        self._mix(y, 15)
        numpy.multiply(y, numpy.uint32(MIX_3), out=y)
        self._mix(y, 16)
        for lane, part in ((x, parts[2]), (y, parts[3])):
            numpy.bitwise_xor(lane, numpy.uint32(part), out=lane)
            numpy.bitwise_or(lane, numpy.uint32(1), out=lane)
        return x, y

    def _mix(self, lane: Any, shift: int) -> None:
        shifted = self._shifted[: lane.size]
        numpy.right_shift(lane, numpy.uint32(shift), out=shifted)
        numpy.bitwise_xor(lane, shifted, out=lane)
