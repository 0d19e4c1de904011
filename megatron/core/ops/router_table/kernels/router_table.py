# No arithmetic on values.
"""Each token's choices written into its row of a table."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def router_table_kernel(
    ids_ptr,
    value_ptr,
    table_ptr,
    tokens,
    experts,
    K: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """table[t, ids[t, j]] = value[t, j], or 1 without values; 0 elsewhere."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    there = row < tokens
    place = row[:, None] * experts + expert[None, :]
    table = tl.zeros((ROWS, BLOCK_E), table_ptr.dtype.element_ty)
    for j in tl.static_range(K):
        chosen = tl.load(ids_ptr + row * K + j, mask=there, other=-1)
        if HAS_VALUE:
            value = tl.load(value_ptr + row * K + j, mask=there, other=0)
            table = tl.where(chosen[:, None] == expert[None, :], value[:, None], table)
        else:
            table = tl.where(chosen[:, None] == expert[None, :], 1, table).to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + place, table, mask=there[:, None] & (expert[None, :] < experts))
