# Order of addition: a row's chosen scores, and what its gradients share, are added choice by choice, ascending.
"""A token's chosen scores, normalised and scaled, and the gradient of all its scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chosen(score_ptr, ids_ptr, row, tokens, token_stride, expert_stride, K: tl.constexpr):
    """Scores and ids of the choices of rows, and the sum of each row's scores + 1e-20."""
    there = row < tokens
    taken, ids = (), ()
    total = tl.zeros(row.shape, dtype=tl.float32)
    for j in tl.static_range(K):
        expert = tl.load(ids_ptr + row * K + j, mask=there, other=0)
        score = tl.load(score_ptr + row * token_stride + expert * expert_stride, mask=there, other=1.0)
        taken, ids = taken + (score,), ids + (expert,)
        total += score
    return taken, ids, total + 1e-20


@triton.jit
def router_weights_fwd_kernel(
    score_ptr, ids_ptr, weight_ptr, tokens, token_stride, expert_stride, factor,
    K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """weight[t, j] = score[t, ids[t, j]] / (sum over j + 1e-20) * factor, or without the division."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    taken, _, total = _chosen(score_ptr, ids_ptr, row, tokens, token_stride, expert_stride, K)
    for j in tl.static_range(K):
        weight = tl.div_rn(taken[j], total) if NORMALISE else taken[j]
        tl.store(weight_ptr + row * K + j, weight * factor, mask=row < tokens)


@triton.jit
def router_weights_bwd_kernel(
    score_ptr, ids_ptr, grad_ptr, dscore_ptr, tokens, experts, token_stride, expert_stride, factor,
    K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dscore[t, ids[t, j]] = (grad[t, j] - sum over i of grad[t, i] weight[t, i]) * factor / total[t] with weights
    before the factor, or grad[t, j] * factor; 0 elsewhere."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    taken, ids, total = _chosen(score_ptr, ids_ptr, row, tokens, token_stride, expert_stride, K)
    scale = tl.div_rn(1.0, total) if NORMALISE else tl.full(row.shape, 1.0, tl.float32)
    grads = ()
    along = tl.zeros(row.shape, dtype=tl.float32)
    for j in tl.static_range(K):
        grad = tl.load(grad_ptr + row * K + j, mask=row < tokens, other=0.0) * factor * scale
        if NORMALISE:
            along += grad * (taken[j] * scale)
        grads = grads + (grad,)
    expert = tl.arange(0, BLOCK_E)[None, :]
    dscore = tl.zeros((ROWS, BLOCK_E), dtype=tl.float32)
    for j in tl.static_range(K):
        dscore = tl.where(ids[j] == expert, grads[j] - along, dscore)
    tl.store(dscore_ptr + row * experts + expert, dscore, mask=(row < tokens) & (expert < experts))
