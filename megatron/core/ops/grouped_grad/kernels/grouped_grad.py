# Order of addition: the main gradient, then blocks of the expert's rows ascending, each in the order of the MMA.
"""Weight gradients of all experts in one launch, added to the fp32 main gradient by the tile that made them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_grad_kernel(
    main_ptr, dy_desc, x_desc, ends_ptr, width_y, width_x, main_e, main_y,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """main[e] += dy_e^T x_e. Grid: tiles of [Y, X], experts; TILES neighbouring tiles of Y share their columns of x.

    The descriptors cover the rows of all experts; rows of the next expert are zeroed in the last block.
    """
    expert = tl.program_id(1).to(tl.int64)
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if start == end:
        return
    tiles_y, tiles_x = tl.cdiv(width_y, BLOCK_Y), tl.cdiv(width_x, BLOCK_X)
    band = tl.program_id(0) // (TILES * tiles_x)
    height = tl.minimum(tiles_y - band * TILES, TILES)
    within = tl.program_id(0) % (TILES * tiles_x)
    first_y = (band * TILES + within % height) * BLOCK_Y
    first_x = (within // height) * BLOCK_X
    r, y, x = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_Y), tl.arange(0, BLOCK_X)
    place = main_ptr + expert * main_e + first_y.to(tl.int64) * main_y + first_x + (y[:, None] * main_y + x[None, :])
    inside = (y < width_y - first_y)[:, None] & (x < width_x - first_x)[None, :]
    # Read first, so that it arrives while the first blocks do.
    total = tl.load(place, mask=inside, other=0.0)
    whole = (end - start) // BLOCK_R
    for block in tl.range(0, whole):
        dy_tile = dy_desc.load([start + block * BLOCK_R, first_y])
        x_tile = x_desc.load([start + block * BLOCK_R, first_x])
        total = tl.dot(tl.trans(dy_tile), x_tile, acc=total)
    last = start + whole * BLOCK_R
    if last < end:
        there = (r < end - last)[:, None]
        dy_tile = tl.where(there, dy_desc.load([last, first_y]), 0.0)
        x_tile = tl.where(there, x_desc.load([last, first_x]), 0.0)
        total = tl.dot(tl.trans(dy_tile), x_tile, acc=total)
    tl.store(place, total, mask=inside)
