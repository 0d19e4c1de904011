# Order of addition: none; wrapping sums of integers are exact in any order.
"""The digest of traces: every slot is one program, which reads its tiles one after the other."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x, multiplier):
    """One round of digest_words/definition.py."""
    x = x * multiplier
    return x ^ (x >> 31)


@triton.jit
def position_keys(index):
    """What the words at these places are mixed with."""
    step = tl.full(index.shape, -0x61C8864680B583EB, tl.int64)
    first = tl.full(index.shape, -0x40A7B892E31B1A47, tl.int64)
    second = tl.full(index.shape, -0x6B2FB644ECCEEE15, tl.int64)
    return mix(index * step + first, second)


@triton.jit
def both_lanes(words, index, inside):
    """What the words add to the two sums; 0 where there is no word."""
    first = tl.full(words.shape, -0x40A7B892E31B1A47, tl.int64)
    second = tl.full(words.shape, -0x6B2FB644ECCEEE15, tl.int64)
    mixed = mix(words ^ position_keys(index), first)
    return tl.where(inside, mixed, 0), tl.where(inside, mix(mixed, second), 0)


@triton.jit(do_not_specialize=["num_bytes", "slots"])
def digest_words_kernel(
    raw_ptr, out_ptr, num_bytes, slots, ROUNDS: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr
):
    """out[lane, slot]; ``TAIL``: the last word is short and read byte by byte."""
    slot = tl.program_id(0).to(tl.int64)
    words_ptr = raw_ptr.to(tl.pointer_type(tl.int64))
    whole = num_bytes // 8
    first, second = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    for turn in range(ROUNDS):
        index = (turn * slots + slot) * TILE + tl.arange(0, TILE)
        inside = index < whole
        lanes = both_lanes(tl.load(words_ptr + index, mask=inside, other=0), index, inside)
        first += lanes[0]
        second += lanes[1]
    total, other = tl.sum(first, 0), tl.sum(second, 0)
    if TAIL:
        place = tl.arange(0, 8).to(tl.int64)
        byte = tl.load(raw_ptr + whole * 8 + place, mask=whole * 8 + place < num_bytes, other=0)
        word = tl.sum(byte.to(tl.int64) << (8 * place), 0) + tl.zeros((8,), tl.int64)
        mine = (place == 0) & ((whole // TILE) % slots == slot)
        lanes = both_lanes(word, whole + tl.zeros((8,), tl.int64), mine)
        total += tl.sum(lanes[0], 0)
        other += tl.sum(lanes[1], 0)
    tl.store(out_ptr + slot, total)
    tl.store(out_ptr + slots + slot, other)
