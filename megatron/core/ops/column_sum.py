# Order of addition: row r goes to slot r modulo BLOCK_R; a slot adds its rows ascending, slots add by a fixed tree.
"""The second stage of two-stage sums: adds partial rows that the programs of a kernel left behind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, cdiv

CHOICES = {"BLOCK_R": (32, 64, 128, 256), "BLOCK_X": (16, 32, 64), "num_warps": (2, 4, 8)}
LAUNCH = Launch(
    kernel="column_sum",
    rule=lambda _: {"BLOCK_R": 64, "BLOCK_X": 32, "num_warps": 4},
    choices=CHOICES,
    new_bits=frozenset(CHOICES),
)


@triton.jit
def column_sum_kernel(parts_ptr, out_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr):  # noqa: N803
    """out[x] = sum over r of parts[r, x]; one program per BLOCK_X columns."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    total = tl.zeros((BLOCK_R, BLOCK_X), dtype=tl.float32)
    # Unrolled, so that several blocks are on their way at once.
    for start in tl.range(0, rows, BLOCK_R, loop_unroll_factor=4):
        row = start + tl.arange(0, BLOCK_R).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(parts_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0), mask=column < columns)


def column_sum(parts_RX: torch.Tensor) -> torch.Tensor:
    """Sum a contiguous fp32 matrix [R, X] over its rows: fp32 [X], the same bits every time."""
    rows, columns = parts_RX.shape
    out_X = parts_RX.new_empty(columns, dtype=torch.float32)
    if columns:
        launch = LAUNCH.config(parts_RX.device, columns)
        run_kernel(column_sum_kernel, (cdiv(columns, launch["BLOCK_X"]),), parts_RX, out_X, rows, columns, **launch)
    return out_X
