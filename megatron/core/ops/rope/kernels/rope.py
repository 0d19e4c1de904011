# Order of addition: none across elements; each output is the sum of two products.
"""Rotation of the first 2R of the head width by halves; the backward is the rotation by the negative angle."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads, width, half, batch, s_stride, b_stride, n_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per position and tile of heads; dims from 2R on are copied."""
    position = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    x_row = x_ptr + (position // batch).to(tl.int64) * s_stride + (position % batch).to(tl.int64) * b_stride
    x_row += head[:, None] * n_stride
    position = position.to(tl.int64)
    out_row = out_ptr + (position * heads + head[:, None]) * width
    if BLOCK_R > 0:
        pair = tl.arange(0, BLOCK_R)[None, :]
        inside = (head < heads)[:, None] & (pair < half)
        cos = tl.load(cos_ptr + position * half + pair, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + position * half + pair, mask=pair < half, other=0.0)
        if INVERSE:
            sin = -sin
        first = tl.load(x_row + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_row + half + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_row + pair, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_row + half + pair, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if BLOCK_D > 0:
        rest = 2 * half + tl.arange(0, BLOCK_D)[None, :]
        inside = (head < heads)[:, None] & (rest < width)
        tl.store(out_row + rest, tl.load(x_row + rest, mask=inside, other=0.0), mask=inside)
