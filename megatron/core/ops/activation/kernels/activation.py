# Order of addition: only a row's weight gradient is a sum: blocks of the row ascending, each position of a block in its
# own accumulator, then one fixed tree.
"""Activations of an MLP with a weight per row, forward and backward; one program per tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl

KINDS = {"squared_relu": 0, "swiglu": 1, "gelu": 2, "gelu_tanh": 3}


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """Activation and its derivative at ``x`` (for swiglu those of silu, the gate)."""
    if KIND == 0:
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    elif KIND == 1:
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif KIND == 2:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        sigmoid = tl.sigmoid(inner)
        value = x * sigmoid
        rise = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = sigmoid + value * (1.0 - sigmoid) * rise
    return value, slope


@triton.jit
def activation_fwd_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, width, x_stride,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = act(x[r]) * weight[r]; swiglu multiplies by the second half of the row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * x_stride + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out, _ = value_and_slope(x, KIND)
    if KIND == 1:
        out *= tl.load(x_ptr + place + width, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        out *= tl.load(weight_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_bwd_kernel(
    x_ptr, weight_ptr, dout_ptr, dx_ptr, dweight_ptr, num_rows, width, x_stride, dx_stride,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and dweight[r] = sum over the row of dout * act(x)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    weight = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(weight_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * x_stride + column[None, :]
        dx_place = row[:, None] * dx_stride + column[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value, slope = value_and_slope(x, KIND)
        dvalue = dout * weight[:, None]
        if KIND == 1:
            up = tl.load(x_ptr + place + width, mask=inside, other=0.0).to(tl.float32)
            dup = dvalue * value
            tl.store(dx_ptr + dx_place + width, dup.to(dx_ptr.dtype.element_ty), mask=inside)
            value *= up
            dvalue *= up
        tl.store(dx_ptr + dx_place, (dvalue * slope).to(dx_ptr.dtype.element_ty), mask=inside)
        total += dout * value
    if WEIGHTED:
        tl.store(dweight_ptr + row, tl.sum(total, axis=1), mask=row < num_rows)
