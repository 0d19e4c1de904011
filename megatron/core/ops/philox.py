"""Philox4x32-10 as a pure function of (key, element index), in integer tensor arithmetic.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. An element's index is its row-major position in
the *global* tensor, so any piece of a draw can be made alone and every layout gets the same values.
"""

from __future__ import annotations

import math

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

Key = tuple[int, int]
"""Two 32-bit words."""


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


def box_index(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Row-major global indices (int64) of the elements of a box of a tensor of ``shape``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + along
    return index


def keep_mask(key: Key, index: torch.Tensor, drop_probability: float) -> torch.Tensor:
    """Boolean dropout mask: True (keep) with probability ``1 - drop_probability``, by an integer comparison.

    Four neighbours share a block: element i takes word i mod 4 of the words of index i div 4.
    """
    words = torch.stack(random_words(key, index >> 2))
    return words.gather(0, (index & 3).unsqueeze(0)).squeeze(0) >= round(drop_probability * 2.0**32)
