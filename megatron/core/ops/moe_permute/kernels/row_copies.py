# Order of addition: gather_sum adds a token's rows over j ascending, from +0.0, in fp32; the others only copy.
"""The two directions between tokens and their rows. Every output element has one writer.

A program takes TOKENS tokens and BLOCK columns of all their rows, so that a token is read, or written, once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scatter_copy_kernel(
    x_ptr, row_of_ptr, rows_ptr, filled_ptr, tokens, width, x_stride,
    COPIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows[row_of[t, j]] = x[t] and filled[row_of[t, j]] = 1; entries that are not -1 are distinct."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    for j in tl.static_range(COPIES):
        row = tl.load(row_of_ptr + token * COPIES + j, mask=token < tokens, other=-1).to(tl.int64)
        tl.store(rows_ptr + row[:, None] * width + column[None, :], x, mask=inside & (row >= 0)[:, None])
        if tl.program_id(1) == 0:
            tl.store(filled_ptr + row, tl.full(row.shape, 1, tl.int8), mask=row >= 0)


@triton.jit
def clear_rest_kernel(filled_ptr, rows_ptr, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows that are not filled."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rest = tl.load(filled_ptr + row, mask=row < num_rows, other=1) == 0
    if tl.max(rest.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros((ROWS, BLOCK), dtype=rows_ptr.dtype.element_ty)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = rest[:, None] & (column < width)[None, :]
            tl.store(rows_ptr + row[:, None] * width + column[None, :], zeros, mask=inside)


@triton.jit
def gather_sum_kernel(
    rows_ptr, row_of_ptr, x_ptr, tokens, width, rows_stride,
    COPIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[t] = sum over j of rows[row_of[t, j]], rounded once."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for j in tl.static_range(COPIES):
        row = tl.load(row_of_ptr + token * COPIES + j, mask=token < tokens, other=-1).to(tl.int64)
        place = rows_ptr + row[:, None] * rows_stride + column[None, :]
        total += tl.load(place, mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
    x = total.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + token[:, None] * width + column[None, :], x, mask=inside)
