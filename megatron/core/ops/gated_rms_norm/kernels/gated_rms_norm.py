# Order of addition: a group of a row is cut into PIECES pieces of PIECE; each place of a piece adds piece by piece,
# then the places by a fixed tree. For the weight's gradient a program adds its tiles ascending, row slot by row slot,
# then the slots by a fixed tree into its own partial; partials are added in program order by column_sum.
"""RMSNorm per group of y * silu(z), forward and backward. The second grid axis is the group.

The weight is read in the shape of the rows, so that Triton lays both out alike and converts neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.device_functions import load_pieces, sigmoid


@triton.jit
def gated_rms_norm_fwd_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, rstd_ptr, num_rows, width, group_size, y_stride, z_stride, eps,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out = v * rsqrt(mean(v^2) + eps) * weight with v = y * silu(z); keeps the reciprocal roots [T, groups]."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    here = row < num_rows
    group = tl.program_id(1)
    within = tl.arange(0, PIECE)[None, :]
    column = group * group_size + within
    ys = load_pieces(y_ptr + row * y_stride + column, within, group_size, here, PIECE, PIECES)
    zs = load_pieces(z_ptr + row * z_stride + column, within, group_size, here, PIECE, PIECES)
    weights = load_pieces(weight_ptr + 0 * row + column, within, group_size, here, PIECE, PIECES)
    squares = tl.zeros((ROWS, PIECE), dtype=tl.float32)
    values = ()
    for p in tl.static_range(PIECES):
        z = zs[p].to(tl.float32)
        value = ys[p].to(tl.float32) * z * sigmoid(z)
        squares += value * value
        values = values + (value,)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / group_size + eps)
    tl.store(rstd_ptr + row * tl.num_programs(1) + group, rstd, mask=here)
    out_at = out_ptr + row * width + column
    for p in tl.static_range(PIECES):
        out = values[p] * rstd * weights[p].to(tl.float32)
        tl.store(out_at + p * PIECE, out.to(out_ptr.dtype.element_ty), mask=(p * PIECE + within < group_size) & here)


@triton.jit
def gated_rms_norm_bwd_kernel(
    y_ptr, z_ptr, weight_ptr, dout_ptr, rstd_ptr, dy_ptr, dz_ptr, dweight_ptr,
    num_rows, width, group_size, y_stride, z_stride, tiles,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Gradients of y and z, and a partial of the weight's over this program's rows."""
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    first = program * tiles
    slot = tl.arange(0, ROWS)[:, None]
    within = tl.arange(0, PIECE)[None, :]
    column = group * group_size + within
    weights = load_pieces(weight_ptr + 0 * slot + column, within, group_size, slot < ROWS, PIECE, PIECES)
    dweights = ()
    for _ in tl.static_range(PIECES):
        dweights = dweights + (tl.zeros((ROWS, PIECE), dtype=tl.float32),)
    for tile in range(tiles):
        row = (first + tile) * ROWS + slot
        here = row < num_rows
        if ROWS == 1:  # one number, which no thread has to get from another
            rstd = tl.load(rstd_ptr + (first + tile) * groups + group, mask=first + tile < num_rows, other=0.0)
        else:
            rstd = tl.load(rstd_ptr + row * groups + group, mask=here, other=0.0)
        ys = load_pieces(y_ptr + row * y_stride + column, within, group_size, here, PIECE, PIECES)
        zs = load_pieces(z_ptr + row * z_stride + column, within, group_size, here, PIECE, PIECES)
        douts = load_pieces(dout_ptr + row * width + column, within, group_size, here, PIECE, PIECES)
        along = tl.zeros((ROWS, PIECE), dtype=tl.float32)
        for p in tl.static_range(PIECES):
            z = zs[p].to(tl.float32)
            normal = ys[p].to(tl.float32) * (z * sigmoid(z)) * rstd
            along += (douts[p].to(tl.float32) * weights[p].to(tl.float32)) * normal
        mean = tl.sum(along, axis=1, keep_dims=True) / group_size
        added = ()
        for p in tl.static_range(PIECES):
            y, z, dout = ys[p].to(tl.float32), zs[p].to(tl.float32), douts[p].to(tl.float32)
            opened = sigmoid(z)
            gate = z * opened
            normal = y * gate * rstd
            dvalue = rstd * (dout * weights[p].to(tl.float32) - normal * mean)
            dz = dvalue * y * (opened + gate * (1.0 - opened))
            place = row * width + column + p * PIECE
            mask = (p * PIECE + within < group_size) & here
            tl.store(dy_ptr + place, (dvalue * gate).to(dy_ptr.dtype.element_ty), mask=mask)
            tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            added = added + (dweights[p] + dout * normal,)
        dweights = added
    at = tl.arange(0, PIECE)
    for p in tl.static_range(PIECES):
        dweight_at = dweight_ptr + program * width + group * group_size + p * PIECE + at
        tl.store(dweight_at, tl.sum(dweights[p], axis=0), mask=p * PIECE + at < group_size)
