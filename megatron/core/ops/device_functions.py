# Order of addition: none; these functions load and map elements.
"""Functions that several Triton kernels call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of fp32 in five instructions, where ``tl.sigmoid`` takes fourteen.

    It is the square of rsqrt(1 + 2^(-x log2 e)), neither of which needs a check of its range: within 2e-6 of the value,
    relative to it, where |x| <= 16; 0 and 1 far out and at the infinities, NaN for NaN.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def load_pieces(at, column, width, wanted, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """The pieces of rows as they lie in memory; zeros outside of ``width`` and of the rows that are ``wanted``."""
    pieces = ()
    for p in tl.static_range(PIECES):
        pieces = pieces + (tl.load(at + p * PIECE, mask=(p * PIECE + column < width) & wanted, other=0.0),)
    return pieces
