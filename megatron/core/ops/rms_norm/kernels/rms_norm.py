# Order of addition: inside a row a fixed tree; for the weight's gradient a program adds its tiles ascending, row slot
# by row slot, then the slots by a fixed tree into its own partial; partials are added in program order by column_sum.
"""RMSNorm over rows, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, width, x_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y = x * rsqrt(mean(x^2) + eps) * weight; keeps the reciprocal root of every row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / width + eps)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + row[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


@triton.jit
def rms_norm_bwd_kernel(
    x_ptr, weight_ptr, dy_ptr, rstd_ptr, dx_ptr, dweight_ptr, num_rows, width, x_stride, tiles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (dy * w - xhat * mean(dy * w * xhat)); a partial of sum(dy * xhat) over this program's rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    row = program * tiles * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    next_x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    next_dy = tl.load(dy_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    next_rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
    for tile in range(tiles):
        x, dy, rstd = next_x.to(tl.float32), next_dy.to(tl.float32), next_rstd
        # The next tile is on its way while this one is worked on.
        ahead = row + ROWS
        coming = (ahead < num_rows) & (tile + 1 < tiles)
        wanted = coming[:, None] & (column < width)[None, :]
        next_x = tl.load(x_ptr + ahead[:, None] * x_stride + column[None, :], mask=wanted, other=0.0)
        next_dy = tl.load(dy_ptr + ahead[:, None] * width + column[None, :], mask=wanted, other=0.0)
        next_rstd = tl.load(rstd_ptr + ahead, mask=coming, other=0.0)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        xhat = x * rstd[:, None]
        dyw = dy * weight[None, :]
        mean = tl.sum(dyw * xhat, axis=1) / width
        dx = rstd[:, None] * (dyw - xhat * mean[:, None])
        tl.store(dx_ptr + row[:, None] * width + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight += dy * xhat
        row = ahead
    tl.store(dweight_ptr + program * width + column, tl.sum(dweight, axis=0), mask=column < width)
