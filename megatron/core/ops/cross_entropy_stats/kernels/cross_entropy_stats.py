# Order of addition: blocks of a row ascending, each block by a fixed tree, rescaled when the maximum grows.
"""Row maximum, sum of exponentials and target logit in one pass over the logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_stats_kernel(
    logits_ptr, target_ptr, max_ptr, sum_ptr, picked_ptr, num_valid, stride, BLOCK: tl.constexpr
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    top = float("-inf")
    total = 0.0
    for start in range(0, num_valid, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column, mask=column < num_valid, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(logit, axis=0))
        # Where nothing but -inf has come yet there is nothing to subtract.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logit - base), axis=0)
        top = new_top
    target = tl.load(target_ptr + token)
    has = (target >= 0) & (target < num_valid)
    tl.store(max_ptr + token, top)
    tl.store(sum_ptr + token, total)
    tl.store(picked_ptr + token, tl.load(row_ptr + target, mask=has, other=0.0).to(tl.float32))
