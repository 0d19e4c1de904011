# Order of addition: blocks of an expert's rows ascending, each block in the order of the MMA; then the main gradient.
"""Weight gradients of all experts in one launch, added to the fp32 main gradient by the tile that made them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_grad_kernel(
    main_ptr, dy_ptr, x_ptr, ends_ptr, width_y, width_x, main_e, main_y, dy_stride, x_stride,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """main[e] += dy_e^T x_e. Grid: tiles of [Y, X], experts; TILES neighbouring tiles of Y share their columns of x."""
    expert = tl.program_id(1).to(tl.int64)
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    tiles_y, tiles_x = tl.cdiv(width_y, BLOCK_Y), tl.cdiv(width_x, BLOCK_X)
    band = tl.program_id(0) // (TILES * tiles_x)
    height = tl.minimum(tiles_y - band * TILES, TILES)
    within = tl.program_id(0) % (TILES * tiles_x)
    first_y = (band * TILES + within % height) * BLOCK_Y
    first_x = (within // height) * BLOCK_X
    r, y, x = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_Y), tl.arange(0, BLOCK_X)
    dy_at = dy_ptr + start.to(tl.int64) * dy_stride + first_y + (r[:, None] * dy_stride + y[None, :])
    x_at = x_ptr + start.to(tl.int64) * x_stride + first_x + (r[:, None] * x_stride + x[None, :])
    inside_y, inside_x = (y < width_y - first_y)[None, :], (x < width_x - first_x)[None, :]
    total = tl.zeros((BLOCK_Y, BLOCK_X), dtype=tl.float32)
    for done in tl.range(0, end - start, BLOCK_R):
        there = (r < end - start - done)[:, None]
        dy_tile = tl.load(dy_at, mask=there & inside_y, other=0.0)
        x_tile = tl.load(x_at, mask=there & inside_x, other=0.0)
        total = tl.dot(tl.trans(dy_tile), x_tile, acc=total, input_precision="ieee")
        dy_at += BLOCK_R * dy_stride
        x_at += BLOCK_R * x_stride
    if end > start:
        main_at = main_ptr + expert * main_e + first_y.to(tl.int64) * main_y + first_x
        place = main_at + (y[:, None] * main_y + x[None, :])
        inside = (y < width_y - first_y)[:, None] & inside_x
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
