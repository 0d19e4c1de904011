# No floating-point addition but score + bias, once per element; all else compares integers.
"""The k best experts of a token by one integer key per expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def best_experts(value, inside, expert, K: tl.constexpr):
    """Where the K best of each row are: those with the largest key. A key orders by value (NaN on top, zeros equal),
    then by the lower id."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value != value, 0x7FFFFFFF, order)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, order.to(tl.int64) * 0x100000000 + (0x7FFFFFFF - expert)[None, :], lowest)
    left = key
    for _ in tl.static_range(K):
        best = tl.max(left, axis=1)
        left = tl.where(left == best[:, None], lowest, left)
    return (left != key) & inside


@triton.jit
def router_topk_kernel(
    score_ptr,
    bias_ptr,
    ids_ptr,
    tokens,
    experts,
    stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """ids[t] = the K best experts of score + bias, ascending."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    inside = (row[:, None] < tokens) & (expert[None, :] < experts)
    place = row[:, None].to(tl.int64) * stride + expert[None, :]
    value = tl.load(score_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    chosen = best_experts(value, inside, expert, K)
    slot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(ids_ptr + row[:, None].to(tl.int64) * K + slot, expert[None, :].to(tl.int64), mask=chosen)
