"""Philox4x32-10 as a pure function of (key, element index), in integer tensor arithmetic.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. An element's index is its row-major position in
the *global* tensor, so any piece of a draw can be made alone and every layout gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from megatron.core.contracts.param_spec import Box, LogicalShard

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

Key = tuple[int, int]
"""Two 32-bit words."""

_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 20}
"""Elements drawn at a time: a dozen int64 tensors of them live at once. Those of a processor fit its cache, those of a
GPU are long enough that launches do not count."""


def philox(counters: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, ...]:
    """Ten rounds on four counter words; words are int64 tensors holding 32-bit values, out as in."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def random_words(key: Key, index: torch.Tensor, draw: int = 0) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (in int64 tensors) for every element index; ``draw`` numbers further draws of one element."""
    index = index.to(torch.int64)
    zero = torch.zeros_like(index)
    return philox((index & _LOW, (index >> 32) & _LOW, zero + draw, zero), key)


def uniform(key: Key, index: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1) with 24 random bits for every element index."""
    return (random_words(key, index)[0] >> 8).to(torch.float32) * 2.0**-24


def box_index(shape: tuple[int, ...], box: Box, device: torch.device) -> torch.Tensor:
    """Row-major global indices (int64) of the elements of a box of a tensor of ``shape``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + along
    return index


def shard_index(
    shape: tuple[int, ...], shard: LogicalShard, start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Row-major global indices (int64) of elements ``start ... stop`` of a shard of a tensor of ``shape``; elements
    of the shard count in its own row-major order."""
    extents, first = shard.shape, shard.boxes[0]
    place = torch.arange(start, stop, dtype=torch.int64, device=device)
    index = place + sum(begin * math.prod(shape[dim + 1 :]) for dim, (begin, _) in enumerate(first))
    for dim, extent in enumerate(extents):
        stride, inner = math.prod(shape[dim + 1 :]), math.prod(extents[dim + 1 :])
        if dim == shard.dim:
            border = 0
            for before, box in pairwise(shard.boxes):
                border += before[dim][1] - before[dim][0]
                if skipped := box[dim][0] - before[dim][1]:
                    index += (place // inner % extent >= border) * (skipped * stride)
        # Every step of the dims before this one passes over what the shard lacks of this one.
        if extent != shape[dim] and inner * extent < stop:
            index += place // (inner * extent) * ((shape[dim] - extent) * stride)
    return index


def draw_into(
    out: torch.Tensor,
    shape: tuple[int, ...],
    shard: LogicalShard,
    draw: Callable[[torch.Tensor], torch.Tensor],
    start: int = 0,
) -> None:
    """Fill ``out`` (contiguous, of any shape) with ``draw`` of the global indices of the elements of a shard of a
    tensor of ``shape``, from the shard's element ``start`` on. What ``draw`` returns is rounded once to the type of
    ``out``. It is called with a bounded number of indices at a time, whatever the shape."""
    flat = out.view(-1)
    for piece in flat.split(_AT_ONCE.get(out.device.type, 1 << 20)) if out.numel() else ():
        stop = start + piece.numel()
        piece.copy_(draw(shard_index(shape, shard, start, stop, out.device)))
        start = stop


def keep_mask(key: Key, index: torch.Tensor, drop_probability: float) -> torch.Tensor:
    """Boolean dropout mask: True (keep) with probability ``1 - drop_probability``, by an integer comparison.

    Four neighbours share a block: element i takes word i mod 4 of the words of index i div 4.
    """
    words = torch.stack(random_words(key, index >> 2))
    return words.gather(0, (index & 3).unsqueeze(0)).squeeze(0) >= round(drop_probability * 2.0**32)


def box_mask(key: Key, shape: tuple[int, ...], box: Box, drop_probability: float, device: torch.device) -> torch.Tensor:
    """``keep_mask`` of all elements of a box of a tensor of ``shape``: one byte each, the integers in small pieces."""
    keep = torch.empty([stop - start for start, stop in box], dtype=torch.bool, device=device)
    draw_into(keep, shape, LogicalShard(index=0, boxes=(box,)), lambda index: keep_mask(key, index, drop_probability))
    return keep
