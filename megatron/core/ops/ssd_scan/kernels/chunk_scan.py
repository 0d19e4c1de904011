# Order of addition: inside a chunk matrix products over positions or states in the order of the MMA tiles; heads of a
# group ascending where they share B and C.
"""Outputs of a chunk from its own positions and the state before it, forward and backward.

One program has a chunk of a group: it goes through the group's heads, so that the gradients of B and C have one writer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def since_of(start_ptr, sample, position, chunk, length, L: tl.constexpr, RESETS: tl.constexpr):
    """Where the sequence of each position begins, from the chunk's first position; below 0: before it, as everywhere
    without RESETS. Positions behind the last belong to its sequence."""
    if RESETS:
        return tl.load(start_ptr + sample * length + tl.minimum(position, length - 1)) - (chunk * L).to(tl.int32)
    return tl.full(position.shape, -1, tl.int32)


@triton.jit
def decay_between(cum_to, cum_from, since, L: tl.constexpr, UPPER: tl.constexpr, RESETS: tl.constexpr):
    """[to, from] exp(cum_to - cum_from) where from <= to in one sequence, else 0; UPPER: the transpose of it."""
    row = tl.arange(0, L)[:, None]
    column = tl.arange(0, L)[None, :]
    if UPPER:
        seen = row <= column
        if RESETS:
            seen = seen & (row >= since[None, :])
        return tl.exp(tl.where(seen, cum_to[None, :] - cum_from[:, None], float("-inf")))
    seen = row >= column
    if RESETS:
        seen = seen & (column >= since[:, None])
    return tl.exp(tl.where(seen, cum_to[:, None] - cum_from[None, :], float("-inf")))


@triton.jit
def decay_from_start(cum, since, RESETS: tl.constexpr):
    """exp(cum): what is left at positions of the state before the chunk; 0 in sequences that began since."""
    if RESETS:
        return tl.where(since < 0, tl.exp(cum), 0.0)
    return tl.exp(cum)


@triton.jit
def decay_to_end(end, cum, since_end, L: tl.constexpr, RESETS: tl.constexpr):
    """exp(end - cum): what is left of positions at the chunk's end; 0 of sequences that were over before."""
    if RESETS:
        return tl.where(tl.arange(0, L) >= since_end, tl.exp(end - cum), 0.0)
    return tl.exp(end - cum)


@triton.jit
def chunk_scan_fwd_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, step_ptr, cum_ptr, states_ptr, y_ptr, start_ptr,
    length, heads, heads_per_group, width, num_state, chunks, x_b, x_s, x_n, B_b, B_s, B_g, C_b, C_s, C_g,
    L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, RESETS: tl.constexpr,
):  # fmt: skip
    """y = ((C B^T * decay * step) x) + exp(cum) C h^T + D x. Grid: chunks, groups, samples."""
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    position = chunk * L + tl.arange(0, L)
    d, k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    there = (position < length)[:, None]
    B_place = sample * B_b + group * B_g + position[:, None] * B_s + k[None, :]
    C_place = sample * C_b + group * C_g + position[:, None] * C_s + k[None, :]
    B = tl.load(B_ptr + B_place, mask=there & (k < num_state)[None, :], other=0.0)
    C = tl.load(C_ptr + C_place, mask=there & (k < num_state)[None, :], other=0.0)
    since = since_of(start_ptr, sample, position, chunk, length, L, RESETS)
    CB = tl.dot(C, tl.trans(B), input_precision="ieee")
    inside = there & (d < width)[None, :]
    inside_state = (k < num_state)[:, None] & (d < width)[None, :]
    for i in tl.range(0, heads_per_group):
        head = group * heads_per_group + i
        work = (sample * heads + head) * chunks * L + position
        cum = tl.load(cum_ptr + work)
        step = tl.load(step_ptr + work)
        x = tl.load(x_ptr + sample * x_b + head * x_n + position[:, None] * x_s + d[None, :], mask=inside, other=0.0)
        state_ptr = states_ptr + ((sample * chunks + chunk) * heads + head) * width * num_state
        state_KD = tl.load(state_ptr + d[None, :] * num_state + k[:, None], mask=inside_state, other=0.0)
        y = tl.dot(C, state_KD, input_precision="ieee") * decay_from_start(cum, since, RESETS)[:, None]
        weight = CB * decay_between(cum, cum, since, L, False, RESETS) * step[None, :]
        y = tl.dot(weight.to(x.dtype), x, acc=y, input_precision="ieee")
        y += x.to(tl.float32) * tl.load(D_ptr + head).to(tl.float32)
        y_place = ((sample * length + position[:, None]) * heads + head) * width + d[None, :]
        tl.store(y_ptr + y_place, y.to(y_ptr.dtype.element_ty), mask=inside)
