# Order of addition: a token's scores by a tree fixed by the launch. A sequence's tokens are cut into blocks of ROWS,
# each added by a fixed tree; block r goes to slot r modulo BLOCK_R, a slot adds its blocks ascending, slots add by a
# fixed tree. Counts are integers.
"""Normalised scores and choices of experts, summed over the tokens of sequences, and the gradient of the scores.

A sequence has fewer than 2^31 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.router_topk.kernels.router_topk import best_experts


@triton.jit
def _normalised(score_ptr, row, inside, expert, token_stride, SOFTMAX: tl.constexpr):
    """Normalised scores of rows, and what each row was divided by; nothing of meaning outside."""
    value = tl.load(score_ptr + row * token_stride + expert, mask=inside, other=0.0)
    if SOFTMAX:
        largest = tl.max(tl.where(inside, value, float("-inf")), axis=1, keep_dims=True)
        value = tl.where(inside, tl.exp(value - largest), 0.0)
        total = tl.sum(value, axis=1, keep_dims=True)
    else:
        total = tl.sum(value, axis=1, keep_dims=True) + 1e-20
    return tl.div_rn(value, total), total


@triton.jit
def router_balance_fwd_kernel(
    score_ptr, parts_ptr, length, sequences, experts, token_stride,
    K: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """parts[block, 0, b] and [block, 1, b]: sums and counts over one block of sequence b. The second grid axis is b."""
    block, sequence = tl.program_id(0), tl.program_id(1)
    position = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.arange(0, BLOCK_E)
    inside = (position < length) & (expert < experts)[None, :]
    p, _ = _normalised(score_ptr, position * sequences + sequence, inside, expert[None, :], token_stride, SOFTMAX)
    chosen = best_experts(p, inside, expert, K)
    columns = sequences * experts
    at = parts_ptr + block.to(tl.int64) * 2 * columns + sequence * experts + expert
    tl.store(at, tl.sum(tl.where(inside, p, 0.0), axis=0), mask=expert < experts)
    # At most ROWS, which fp32 holds exactly.
    tl.store(at + columns, tl.sum(chosen.to(tl.int32), axis=0).to(tl.float32), mask=expert < experts)


@triton.jit
def router_balance_sum_kernel(
    parts_ptr, p_ptr, count_ptr, blocks, columns, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """p = sum over blocks of parts[:, 0], count = the same of parts[:, 1]; one program per BLOCK_X columns.

    AT_ONCE loads are on their way at once; those behind the last block add zeros.
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    p = tl.zeros((BLOCK_R, BLOCK_X), dtype=tl.float32)
    count = tl.zeros((BLOCK_R, BLOCK_X), dtype=tl.int32)
    start = 0
    while start < blocks:
        for step in tl.static_range(AT_ONCE):
            block = start + step * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
            inside = (block < blocks)[:, None] & (column < columns)[None, :]
            at = parts_ptr + block[:, None] * 2 * columns + column[None, :]
            p += tl.load(at, mask=inside, other=0.0)
            count += tl.load(at + columns, mask=inside, other=0.0).to(tl.int32)
        start += AT_ONCE * BLOCK_R
    tl.store(p_ptr + column, tl.sum(p, axis=0), mask=column < columns)
    tl.store(count_ptr + column, tl.sum(count, axis=0).to(tl.int64), mask=column < columns)


@triton.jit
def router_balance_bwd_kernel(
    score_ptr, grad_ptr, dscore_ptr, tokens, sequences, experts, token_stride,
    SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dscore[t] = (g - sum(g * p)) / divisor, or times p with softmax; g is the gradient of the token's sequence."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = (row < tokens) & (expert < experts)
    p, total = _normalised(score_ptr, row, inside, expert, token_stride, SOFTMAX)
    grad = tl.load(grad_ptr + row % sequences * experts + expert, mask=inside, other=0.0)
    rest = grad - tl.sum(tl.where(inside, grad * p, 0.0), axis=1, keep_dims=True)
    dscore = rest * p if SOFTMAX else tl.div_rn(rest, total)
    tl.store(dscore_ptr + row * experts + expert, dscore, mask=inside)
