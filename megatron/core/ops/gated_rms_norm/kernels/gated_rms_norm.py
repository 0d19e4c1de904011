# Order of addition: inside a group of a row a fixed tree; for the weight's gradient a program adds its tiles ascending,
# row slot by row slot, then the slots by a fixed tree into its own partial, and partials are added in program order by
# column_sum.
"""RMSNorm per group of y * silu(z), forward and backward. The second grid axis is the group."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_rms_norm_fwd_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, rstd_ptr, num_rows, width, group_size, y_stride, z_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = v * rsqrt(mean(v^2) + eps) * weight with v = y * silu(z); keeps the reciprocal roots [T, groups]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = group * group_size + within
    inside = (row < num_rows)[:, None] & (within < group_size)[None, :]
    weight = tl.load(weight_ptr + column, mask=within < group_size, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value = y * z * tl.sigmoid(z)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / group_size + eps)
    out = value * rstd[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row * tl.num_programs(1) + group, rstd, mask=row < num_rows)


@triton.jit
def gated_rms_norm_bwd_kernel(
    y_ptr, z_ptr, weight_ptr, dout_ptr, rstd_ptr, dy_ptr, dz_ptr, dweight_ptr,
    num_rows, width, group_size, y_stride, z_stride, tiles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of y and z, and a partial of the weight's over this program's rows."""
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = group * group_size + within
    weight = tl.load(weight_ptr + column, mask=within < group_size, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    row = program * tiles * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None] & (within < group_size)[None, :]
    next_y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=inside, other=0.0)
    next_z = tl.load(z_ptr + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
    next_dout = tl.load(dout_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    next_rstd = tl.load(rstd_ptr + row * tl.num_programs(1) + group, mask=row < num_rows, other=0.0)
    for tile in range(tiles):
        y, z, dout = next_y.to(tl.float32), next_z.to(tl.float32), next_dout.to(tl.float32)
        rstd = next_rstd
        # The next tile is on its way while this one is worked on.
        ahead = row + ROWS
        coming = (ahead < num_rows) & (tile + 1 < tiles)
        wanted = coming[:, None] & (within < group_size)[None, :]
        next_y = tl.load(y_ptr + ahead[:, None] * y_stride + column[None, :], mask=wanted, other=0.0)
        next_z = tl.load(z_ptr + ahead[:, None] * z_stride + column[None, :], mask=wanted, other=0.0)
        next_dout = tl.load(dout_ptr + ahead[:, None] * width + column[None, :], mask=wanted, other=0.0)
        next_rstd = tl.load(rstd_ptr + ahead * tl.num_programs(1) + group, mask=coming, other=0.0)
        inside = (row < num_rows)[:, None] & (within < group_size)[None, :]
        sigmoid = tl.sigmoid(z)
        gate = z * sigmoid
        normal = y * gate * rstd[:, None]
        scaled = dout * weight[None, :]
        mean = tl.sum(scaled * normal, axis=1) / group_size
        dvalue = rstd[:, None] * (scaled - normal * mean[:, None])
        dy = dvalue * gate
        dz = dvalue * y * (sigmoid + gate * (1.0 - sigmoid))
        place = row[:, None] * width + column[None, :]
        tl.store(dy_ptr + place, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        dweight += dout * normal
        row = ahead
    tl.store(dweight_ptr + program * width + column, tl.sum(dweight, axis=0), mask=within < group_size)
