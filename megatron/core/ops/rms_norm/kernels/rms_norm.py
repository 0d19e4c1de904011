# Order of addition: a row is cut into PIECES pieces of PIECE; each place of a piece adds piece by piece, then the
# places by a fixed tree. For the weight's gradient a program adds its tiles ascending, row slot by row slot, then the
# slots by a fixed tree into its own partial; partials are added in program order by column_sum.
"""RMSNorm over rows, forward and backward.

The weight is read in the shape of the rows, so that Triton lays both out alike and converts neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.device_functions import load_pieces


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, width, x_stride, eps,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """y = x * rsqrt(mean(x^2) + eps) * weight; keeps the reciprocal root of every row."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    here = row < num_rows
    column = tl.arange(0, PIECE)[None, :]
    xs = load_pieces(x_ptr + row * x_stride + column, column, width, here, PIECE, PIECES)
    weights = load_pieces(weight_ptr + 0 * row + column, column, width, here, PIECE, PIECES)
    squares = tl.zeros((ROWS, PIECE), dtype=tl.float32)
    for p in tl.static_range(PIECES):
        x = xs[p].to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=here)
    y_at = y_ptr + row * width + column
    for p in tl.static_range(PIECES):
        y = xs[p].to(tl.float32) * rstd * weights[p].to(tl.float32)
        tl.store(y_at + p * PIECE, y.to(y_ptr.dtype.element_ty), mask=(p * PIECE + column < width) & here)


@triton.jit
def rms_norm_bwd_kernel(
    x_ptr, weight_ptr, dy_ptr, rstd_ptr, dx_ptr, dweight_ptr, num_rows, width, x_stride, tiles,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (dy * w - xhat * mean(dy * w * xhat)); a partial of sum(dy * xhat) over this program's rows.

    STAGES - 1 tiles are on their way to shared memory while one is worked on.
    """
    program = tl.program_id(0).to(tl.int64)
    first = program * tiles
    slot = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PIECE)[None, :]
    weights = load_pieces(weight_ptr + 0 * slot + column, column, width, slot < ROWS, PIECE, PIECES)
    dweights = ()
    for _ in tl.static_range(PIECES):
        dweights = dweights + (tl.zeros((ROWS, PIECE), dtype=tl.float32),)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = (first + tile) * ROWS + slot
        here = row < num_rows
        if ROWS == 1:  # one number, which no thread has to get from another
            rstd = tl.load(rstd_ptr + first + tile, mask=first + tile < num_rows, other=0.0)
        else:
            rstd = tl.load(rstd_ptr + row, mask=here, other=0.0)
        xs = load_pieces(x_ptr + row * x_stride + column, column, width, here, PIECE, PIECES)
        dys = load_pieces(dy_ptr + row * width + column, column, width, here, PIECE, PIECES)
        along = tl.zeros((ROWS, PIECE), dtype=tl.float32)
        for p in tl.static_range(PIECES):
            along += (dys[p].to(tl.float32) * weights[p].to(tl.float32)) * (xs[p].to(tl.float32) * rstd)
        mean = tl.sum(along, axis=1, keep_dims=True) / width
        dx_at = dx_ptr + row * width + column
        added = ()
        for p in tl.static_range(PIECES):
            xhat, dy = xs[p].to(tl.float32) * rstd, dys[p].to(tl.float32)
            dx = rstd * (dy * weights[p].to(tl.float32) - xhat * mean)
            mask = (p * PIECE + column < width) & here
            tl.store(dx_at + p * PIECE, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            added = added + (dweights[p] + dy * xhat,)
        dweights = added
    at = tl.arange(0, PIECE)
    for p in tl.static_range(PIECES):
        dweight = tl.sum(dweights[p], axis=0)
        tl.store(dweight_ptr + program * width + p * PIECE + at, dweight, mask=p * PIECE + at < width)
