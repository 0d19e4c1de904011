# Order of addition: the 64 rows of a block are added by a fixed tree, then block after block, ascending.
"""The second stage of two-stage sums: adds partial rows that the programs of a kernel left behind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64
BLOCK_COLUMNS = 32


@triton.jit
def column_sum_kernel(parts_ptr, out_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr):  # noqa: N803
    """out[x] = sum over r of parts[r, x]; one program per BLOCK_X columns."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    total = tl.zeros((BLOCK_X,), dtype=tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        part = tl.load(parts_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part, axis=0)
    tl.store(out_ptr + column, total, mask=column < columns)


def column_sum(parts_RX: torch.Tensor) -> torch.Tensor:
    """Sum a contiguous fp32 matrix [R, X] over its rows: fp32 [X], the same bits every time."""
    rows, columns = parts_RX.shape
    out_X = torch.empty(columns, dtype=torch.float32, device=parts_RX.device)
    if columns:
        column_sum_kernel[(triton.cdiv(columns, BLOCK_COLUMNS),)](
            parts_ptr=parts_RX,
            out_ptr=out_X,
            rows=rows,
            columns=columns,
            BLOCK_R=BLOCK_ROWS,
            BLOCK_X=BLOCK_COLUMNS,
            num_warps=4,
        )
    return out_X
