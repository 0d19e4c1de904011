# Order of addition: inside a chunk matrix products over positions or states in the order of the MMA tiles; heads of a
# group ascending in the gradients of B and C. Every array has one writer per element.
"""Gradients of a chunk's scan. A program has a chunk of a group, and goes through the group's heads.

B and C are shared by the heads of a group, so what pairs of positions give to their gradients is summed over the heads
first: one matrix [L, L] per program of the first kernel, which the second one multiplies by B and by C.

A position's log decay gets gradient from all that crosses it: pairs inside the chunk and what leaves for the chunk's
end (first kernel); what comes from the chunk's start or passes from start to end (second kernel, one slot per tile of
K).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.ssd_scan.kernels.chunk_scan import decay_between, decay_from_start, decay_to_end, since_of


@triton.jit
def chunk_scan_bwd_values_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, step_ptr, cum_ptr, dstates_ptr, dy_ptr, dx_ptr, dD_ptr, dstep_ptr, ddecay_ptr,
    pairs_ptr, start_ptr, length, heads, heads_per_group, width, num_state, chunks, x_b, x_s, x_n, B_b, B_s, B_g, C_b,
    C_s, C_g,
    L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, RESETS: tl.constexpr,
):  # fmt: skip
    """dx, the gradient of step through step * x, partials [B * chunks, N] of dD, the part of ddecay that needs no state
    before the chunk, and pairs [B, chunks, G, L, L] = sum over heads of x dy^T * decay * step, from row to column."""
    chunk, group, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = chunk * L
    row, d, k = tl.arange(0, L), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    there = (row < length - start)[:, None]
    inside_k = there & (k < num_state)[None, :]
    inside = there & (d < width)[None, :]
    inside_state = (d < width)[:, None] & (k < num_state)[None, :]
    B_at = B_ptr + sample * B_b + group * B_g + start * B_s
    C_at = C_ptr + sample * C_b + group * C_g + start * C_s
    B = tl.load(B_at + (row[:, None] * B_s + k[None, :]), mask=inside_k, other=0.0)
    C = tl.load(C_at + (row[:, None] * C_s + k[None, :]), mask=inside_k, other=0.0)
    since = since_of(start_ptr, sample, start + row, chunk, length, L, RESETS)
    since_end = tl.max(since, axis=0) if RESETS else -1
    BC = tl.dot(B, tl.trans(C), input_precision="ieee")
    pairs = tl.zeros((L, L), dtype=tl.float32)
    for i in tl.range(0, heads_per_group):
        head = group * heads_per_group + i
        work = (sample * heads + head) * chunks * L + start
        cum, step = tl.load(cum_ptr + work + row), tl.load(step_ptr + work + row)
        end = tl.load(cum_ptr + work + L - 1)
        x_at = x_ptr + sample * x_b + head * x_n + start * x_s
        x = tl.load(x_at + (row[:, None] * x_s + d[None, :]), mask=inside, other=0.0)
        y_at = ((sample * length + start) * heads + head) * width
        y_place = row[:, None] * (heads * width) + d[None, :]
        dy = tl.load(dy_ptr + y_at + y_place, mask=inside, other=0.0)
        state_at = ((sample * chunks + chunk) * heads + head) * width * num_state
        dstate = tl.load(dstates_ptr + state_at + (d[:, None] * num_state + k[None, :]), mask=inside_state, other=0.0)

        decay = decay_between(cum, cum, since, L, True, RESETS)
        dstepx = tl.dot(B, tl.trans(dstate), input_precision="ieee")
        dstepx *= decay_to_end(end, cum, since_end, L, RESETS)[:, None]
        leaving = tl.sum(x.to(tl.float32) * dstepx, axis=1) * step
        dstepx = tl.dot((BC * decay).to(x.dtype), dy, acc=dstepx, input_precision="ieee")
        dx = dstepx * step[:, None] + dy.to(tl.float32) * tl.load(D_ptr + head).to(tl.float32)
        tl.store(dx_ptr + y_at + y_place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dstep_ptr + work + row, tl.sum(x.to(tl.float32) * dstepx, axis=1))
        dD = tl.sum(tl.sum(x.to(tl.float32) * dy.to(tl.float32), axis=1), axis=0)
        tl.store(dD_ptr + (sample * chunks + chunk) * heads + head, dD)

        pair = tl.dot(x, tl.trans(dy), input_precision="ieee") * decay * step[:, None]
        pairs += pair
        # The diagonal crosses nothing and is left out before anything is subtracted.
        before = row[:, None] < row[None, :]
        pair = tl.where(before, pair * BC, 0.0)
        crossing = tl.cumsum(tl.sum(pair, axis=0) - tl.sum(pair, axis=1), axis=0, reverse=True)
        crossing += tl.cumsum(leaving, axis=0) - leaving
        tl.store(ddecay_ptr + work + row, crossing)
    pairs_at = pairs_ptr + ((sample * chunks + chunk) * tl.num_programs(1) + group) * L * L
    tl.store(pairs_at + (row[:, None] * L + row[None, :]), pairs.to(pairs_ptr.dtype.element_ty))


@triton.jit
def chunk_scan_bwd_states_kernel(
    x_ptr, B_ptr, C_ptr, step_ptr, cum_ptr, states_ptr, dstates_ptr, dy_ptr, dB_ptr, dC_ptr, ddecay_ptr, pairs_ptr,
    start_ptr, length, heads, heads_per_group, width, num_state, chunks, x_b, x_s, x_n, B_b, B_s, B_g, C_b, C_s, C_g,
    slot,
    L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, RESETS: tl.constexpr,
):  # fmt: skip
    """dB and dC for a tile of K, and that tile's part of ddecay at ``slot`` times its number; grid axis 0 has both."""
    tiles = tl.cdiv(num_state, BLOCK_K)
    chunk, group, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    tile = chunk % tiles
    chunk //= tiles
    start = chunk * L
    row, d, k = tl.arange(0, L), tl.arange(0, BLOCK_D), tile.to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = (row < length - start)[:, None]
    inside_k = there & (k < num_state)[None, :]
    inside = there & (d < width)[None, :]
    inside_state = (d < width)[:, None] & (k < num_state)[None, :]
    C_at = C_ptr + sample * C_b + group * C_g + start * C_s
    C = tl.load(C_at + (row[:, None] * C_s + k[None, :]), mask=inside_k, other=0.0)
    since = since_of(start_ptr, sample, start + row, chunk, length, L, RESETS)
    since_end = tl.max(since, axis=0) if RESETS else -1
    dB = tl.zeros((L, BLOCK_K), dtype=tl.float32)
    dC = tl.zeros((L, BLOCK_K), dtype=tl.float32)
    for i in tl.range(0, heads_per_group):
        head = group * heads_per_group + i
        work = (sample * heads + head) * chunks * L + start
        cum, step = tl.load(cum_ptr + work + row), tl.load(step_ptr + work + row)
        end = tl.load(cum_ptr + work + L - 1)
        x_at = x_ptr + sample * x_b + head * x_n + start * x_s
        x = tl.load(x_at + (row[:, None] * x_s + d[None, :]), mask=inside, other=0.0)
        y_at = ((sample * length + start) * heads + head) * width
        dy = tl.load(dy_ptr + y_at + (row[:, None] * (heads * width) + d[None, :]), mask=inside, other=0.0)
        state_at = ((sample * chunks + chunk) * heads + head) * width * num_state
        state_place = d[:, None] * num_state + k[None, :]
        state = tl.load(states_ptr + state_at + state_place, mask=inside_state, other=0.0)
        dstate = tl.load(dstates_ptr + state_at + state_place, mask=inside_state, other=0.0)

        left_K = tl.dot(x, dstate, input_precision="ieee")
        dB += left_K * (decay_to_end(end, cum, since_end, L, RESETS) * step)[:, None]
        carried_K = tl.dot(dy, state, input_precision="ieee") * decay_from_start(cum, since, RESETS)[:, None]
        dC += carried_K
        crossing = tl.cumsum(tl.sum(C.to(tl.float32) * carried_K, axis=1), axis=0, reverse=True)
        through = decay_from_start(end, since_end, RESETS)
        crossing += through * tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        tl.store(ddecay_ptr + tile * slot + work + row, crossing)
    pairs_at = pairs_ptr + ((sample * chunks + chunk) * tl.num_programs(1) + group) * L * L
    pairs = tl.load(pairs_at + (row[:, None] * L + row[None, :]))
    B_at = B_ptr + sample * B_b + group * B_g + start * B_s
    B = tl.load(B_at + (row[:, None] * B_s + k[None, :]), mask=inside_k, other=0.0)
    dB = tl.dot(pairs, C, acc=dB, input_precision="ieee")
    dC = tl.dot(tl.trans(pairs), B, acc=dC, input_precision="ieee")
    out = ((sample * length + start) * tl.num_programs(1) + group) * num_state
    place = row[:, None] * (tl.num_programs(1) * num_state) + k[None, :]
    tl.store(dB_ptr + out + place, dB.to(dB_ptr.dtype.element_ty), mask=inside_k)
    tl.store(dC_ptr + out + place, dC.to(dC_ptr.dtype.element_ty), mask=inside_k)
