# Order of addition: a row of the table adds its tokens one by one in the order of positions, on top of what it held.
"""Sum of token gradients per row of the table, over ids sorted stably."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embedding_grad_kernel(
    main_grad_ptr, dy_ptr, sorted_ptr, order_ptr, tokens, num_rows, width, main_stride, dy_stride, BLOCK: tl.constexpr
):
    """One program per place in the sorted ids and piece of a row; only the first place of a run of equal ids works."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(sorted_ptr + place)
    before = tl.load(sorted_ptr + place - 1, mask=place > 0, other=-1)
    if (row >= 0) & (row < num_rows) & (row != before):
        main_ptr = main_grad_ptr + row * main_stride + column
        total = tl.load(main_ptr, mask=column < width, other=0.0)
        current = row
        while current == row:
            token = tl.load(order_ptr + place)
            total += tl.load(dy_ptr + token * dy_stride + column, mask=column < width, other=0.0).to(tl.float32)
            place += 1
            current = tl.load(sorted_ptr + place, mask=place < tokens, other=-1)
        tl.store(main_ptr, total, mask=column < width)
