# Order of addition: running sums over the positions of a chunk by a fixed scan; partial parameter gradients of a chunk
# by a fixed tree, added in chunk order by column_sum.
"""Time steps and running log decays of each chunk, and the gradients that arrive at them.

Work arrays are [B, N, chunks * L] in fp32; positions past the sequence have dt = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to fp32 accuracy for every x: max(x, 0) + 2 atanh(u / (2 + u)) with u = exp(-|x|)."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def chunk_decay_fwd_kernel(
    dt_ptr, bias_ptr, A_log_ptr, step_ptr, cum_ptr, length, heads, padded, b_stride, s_stride, n_stride,
    L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """step = softplus(dt + bias); cum = running sum of -exp(A_log) step. Grid: chunks, head tiles, samples."""
    position = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    inside = (position < length)[:, None] & (head < heads)[None, :]
    place = sample * b_stride + position[:, None] * s_stride + head[None, :] * n_stride
    raw = tl.load(dt_ptr + place, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + head, mask=head < heads, other=0.0).to(tl.float32))
    step = tl.where(inside, softplus(raw + bias[None, :]), 0.0)
    cum = tl.cumsum(tl.where(inside, rate[None, :] * step, 0.0), axis=0)
    out = (sample * heads + head[None, :]) * padded + position[:, None]
    tl.store(step_ptr + out, step, mask=(head < heads)[None, :])
    tl.store(cum_ptr + out, cum, mask=(head < heads)[None, :])


@triton.jit
def chunk_decay_bwd_kernel(
    dt_ptr, bias_ptr, A_log_ptr, step_ptr, dstep_ptr, ddecay_ptr, ddt_ptr, dA_log_ptr, dbias_ptr,
    length, heads, padded, b_stride, s_stride, n_stride, slot,
    L: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """ddt from the gradients of step and of the log decays (SLOTS parts, added in order), and partials [B * chunks, N]
    of dA_log and dbias.
    """
    position = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    inside = (position < length)[:, None] & (head < heads)[None, :]
    place = sample * b_stride + position[:, None] * s_stride + head[None, :] * n_stride
    raw = tl.load(dt_ptr + place, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + head, mask=head < heads, other=0.0).to(tl.float32))
    work = (sample * heads + head[None, :]) * padded + position[:, None]
    step = tl.load(step_ptr + work, mask=inside, other=0.0)
    dstep = tl.load(dstep_ptr + work, mask=inside, other=0.0)
    ddecay = tl.load(ddecay_ptr + work, mask=inside, other=0.0)
    for _ in tl.static_range(1, SLOTS):
        ddecay_ptr += slot
        ddecay += tl.load(ddecay_ptr + work, mask=inside, other=0.0)
    ddt = (dstep + rate[None, :] * ddecay) * tl.sigmoid(raw + bias[None, :])
    out = (sample * length + position[:, None]) * heads + head[None, :]
    tl.store(ddt_ptr + out, ddt.to(ddt_ptr.dtype.element_ty), mask=inside)
    part = (sample * tl.num_programs(0) + tl.program_id(0)) * heads + head
    tl.store(dA_log_ptr + part, rate * tl.sum(ddecay * step, axis=0), mask=head < heads)
    tl.store(dbias_ptr + part, tl.sum(tl.where(inside, ddt, 0.0), axis=0), mask=head < heads)
