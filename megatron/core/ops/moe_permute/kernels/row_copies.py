# Order of addition: gather_sum adds a token's rows over j ascending, from +0.0, in fp32; the others only copy.
"""The two directions between tokens and their rows, both as gathers. Every output element has one writer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def invert_map_kernel(row_of_ptr, token_of_ptr, entries, copies, BLOCK: tl.constexpr):
    """token_of[row_of[t, j]] = t; entries that are not -1 are distinct."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    tl.store(token_of_ptr + row, (entry // copies).to(tl.int32), mask=row >= 0)


@triton.jit
def gather_copy_kernel(x_ptr, token_of_ptr, rows_ptr, width, x_stride, BLOCK: tl.constexpr):
    """rows[r] = x[token_of[r]], or zeros where no token fills the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_of_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + token * x_stride + column, mask=(column < width) & (token >= 0), other=0.0)
    tl.store(rows_ptr + row * width + column, x, mask=column < width)


@triton.jit
def gather_sum_kernel(rows_ptr, row_of_ptr, x_ptr, copies, width, rows_stride, BLOCK: tl.constexpr):
    """x[t] = sum over j of rows[row_of[t, j]], rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(copies):
        row = tl.load(row_of_ptr + token * copies + j).to(tl.int64)
        inside = (column < width) & (row >= 0)
        total += tl.load(rows_ptr + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + token * width + column, total.to(x_ptr.dtype.element_ty), mask=column < width)
