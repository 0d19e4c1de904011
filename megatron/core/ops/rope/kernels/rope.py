# Order of addition: none across elements; each output is the sum of two products.
"""Rotation of the first 2R of the head width by halves; the backward is the rotation by the negative angle."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr, angle_ptr, out_ptr, heads, width, half, batch, s_stride, b_stride, n_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per position and tile of heads, which share sines and cosines; dims from 2R on are copied."""
    position = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    x_row = x_ptr + (position // batch).to(tl.int64) * s_stride + (position % batch).to(tl.int64) * b_stride
    x_row += head[:, None] * n_stride
    position = position.to(tl.int64)
    out_row = out_ptr + (position * heads + head[:, None]) * width
    if BLOCK_R > 0:
        pair = tl.arange(0, BLOCK_R)
        angle = tl.load(angle_ptr + position * half + pair, mask=pair < half, other=0.0)
        inside = (head < heads)[:, None] & (pair < half)[None, :]
        first = tl.load(x_row + pair[None, :], mask=inside, other=0.0)
        second = tl.load(x_row + half + pair[None, :], mask=inside, other=0.0)
        # In one dim: a thread makes them once for all of its heads.
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
        if INVERSE:
            sin = -sin
        first, second = first.to(tl.float32), second.to(tl.float32)
        at = out_row + pair[None, :]
        tl.store(at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(at + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if BLOCK_D > 0:
        rest = 2 * half + tl.arange(0, BLOCK_D)[None, :]
        inside = (head < heads)[:, None] & (rest < width)
        tl.store(out_row + rest, tl.load(x_row + rest, mask=inside, other=0.0), mask=inside)
