# Order of addition: chunks one after the other, first to last (REVERSE: last to first); inside a chunk one matrix
# product over its positions.
"""The state [D, K] at the border of every chunk, and, running backwards, its gradient: one kernel for both."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.ssd_scan.kernels.chunk_scan import decay_from_start, decay_to_end, since_of


@triton.jit
def chunk_states_kernel(
    x_ptr, B_ptr, step_ptr, cum_ptr, states_ptr, start_ptr, first_ptr, last_ptr,
    length, heads, heads_per_group, width, num_state, chunks, x_b, x_s, x_n, B_b, B_s, B_g,
    L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    REVERSE: tl.constexpr, RESETS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """states[b, c, n] before chunk c of h = exp(cum_end) h + x^T (scale B), scale = exp(cum_end - cum) step.

    REVERSE: x is dy, B is C, scale = exp(cum); states[b, c, n] is the gradient of the state after chunk c. ENDS: h
    begins as first[b, n], fp32, and ends as last[b, n]; else it begins as 0.
    Grid: heads, tiles of D and K, samples.
    """
    head = tl.program_id(0).to(tl.int64)
    tiles_k = tl.cdiv(num_state, BLOCK_K)
    d = (tl.program_id(1) // tiles_k) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = (tl.program_id(1) % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    sample = tl.program_id(2).to(tl.int64)
    x_ptr += sample * x_b + head * x_n
    B_ptr += sample * B_b + (head // heads_per_group) * B_g
    work = (sample * heads + head) * chunks * L
    inside_state = (d < width)[:, None] & (k < num_state)[None, :]
    state_place = d[:, None] * num_state + k[None, :]
    ends = (sample * heads + head) * width * num_state + state_place
    state = tl.zeros((BLOCK_D, BLOCK_K), dtype=tl.float32)
    if ENDS:
        state = tl.load(first_ptr + ends, mask=inside_state, other=0.0)
    for i in tl.range(0, chunks):
        chunk = chunks - 1 - i if REVERSE else i
        position = chunk.to(tl.int64) * L + tl.arange(0, L)
        cum = tl.load(cum_ptr + work + position)
        end = tl.load(cum_ptr + work + chunk * L + L - 1)
        since = since_of(start_ptr, sample, position, chunk, length, L, RESETS)
        since_end = tl.max(since, axis=0) if RESETS else -1
        if REVERSE:
            scale = decay_from_start(cum, since, RESETS)
        else:
            scale = decay_to_end(end, cum, since_end, L, RESETS) * tl.load(step_ptr + work + position)
        there = position < length
        x = tl.load(x_ptr + position[None, :] * x_s + d[:, None], mask=there[None, :] & (d < width)[:, None], other=0.0)
        B = tl.load(
            B_ptr + position[:, None] * B_s + k[None, :], mask=there[:, None] & (k < num_state)[None, :], other=0.0
        )
        out = states_ptr + ((sample * chunks + chunk) * heads + head) * width * num_state + state_place
        tl.store(out, state.to(states_ptr.dtype.element_ty), mask=inside_state)
        scaled = (x.to(tl.float32) * scale[None, :]).to(x.dtype)
        state = tl.dot(scaled, B, acc=state * decay_from_start(end, since_end, RESETS), input_precision="ieee")
    if ENDS:
        tl.store(last_ptr + ends, state, mask=inside_state)
