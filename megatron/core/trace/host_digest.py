"""Digests of host tensors, by NumPy, whose calls cost less than torch's; the numbers are those of the ops."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch

from megatron.core.ops.digest_words.definition import ROW, TILE, mix, place_keys, position_keys, tile_keys
from megatron.core.trace.tensor_words import readable, row_words

TABLE_WORDS = 64 * TILE
"""Words that are digested at once."""
_PLACES = numpy.arange(TILE, dtype=numpy.int64)


def whole(tensor: torch.Tensor) -> list[int]:
    """Two numbers over all elements of a tensor that is not empty."""
    words = row_words(readable(tensor.detach()).view(1, -1))[0].numpy().view(numpy.uint32)
    if words.size <= TABLE_WORDS:
        wide = words.astype(numpy.uint64)
        return [_wrapped(int(numpy.dot(wide, keys[: wide.size]))) for keys in _word_keys()]
    total = [0, 0]
    for begin in range(0, words.size, TABLE_WORDS):
        part = words[begin : begin + TABLE_WORDS].astype(numpy.uint64)
        tiles = numpy.arange(begin // TILE, -(-(begin + part.size) // TILE), dtype=numpy.int64)
        full = part.size // TILE * TILE
        for lane, (place, tile) in enumerate(zip(place_keys(_PLACES), tile_keys(tiles), strict=True)):
            places, sums = place.view(numpy.uint64), numpy.zeros(tiles.size, dtype=numpy.uint64)
            sums[: full // TILE] = numpy.dot(part[:full].reshape(-1, TILE), places)
            if full < part.size:
                sums[-1] = numpy.dot(part[full:], places[: part.size - full])
            total[lane] += int(numpy.dot(sums, tile.view(numpy.uint64)))
    return [_wrapped(lane) for lane in total]


def by_row(words: torch.Tensor, length: int) -> list[int]:
    """A number over the rows of int32 ``[rows, words]`` without their order, then one for each run of ``length`` rows
    with it."""
    rows, width = words.shape
    keys = _row_keys(1 << (width - 1).bit_length())[:width]
    row = numpy.dot(words.numpy().view(numpy.uint32).astype(numpy.uint64), keys).view(numpy.int64)
    placed = mix(row + position_keys(numpy.arange(rows, dtype=numpy.int64)), ROW)
    return [int(mix(row, ROW).sum()), *numpy.add.reduceat(placed, range(0, rows, length)).tolist()]


@cache
def _word_keys() -> list[Any]:
    """Both keys of the first words of a tensor, place and tile together."""
    tiles = numpy.arange(TABLE_WORDS // TILE, dtype=numpy.int64)
    pairs = zip(place_keys(_PLACES), tile_keys(tiles), strict=True)
    return [(tile[:, None] * place).reshape(-1).view(numpy.uint64) for place, tile in pairs]


@cache
def _row_keys(count: int) -> Any:
    """The keys of the first words of a row."""
    return (position_keys(numpy.arange(count, dtype=numpy.int64)) | 1).view(numpy.uint64)


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
