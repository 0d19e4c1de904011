# Order of addition: none; wrapping sums of integers are exact in any order.
"""Layout-free digests of pieces: a partial sum per tile of a piece, then the sum of each piece's tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x, SHIFT: tl.constexpr, multiplier):
    """One round on uint32."""
    return (x ^ (x >> SHIFT)) * multiplier


@triton.jit
def word_keys(index, key_0, key_1):
    """Both odd keys of the words ``index`` of a shard, as digest_pieces/definition.py makes them; uint32."""
    high = tl.full(index.shape, 0x9E3779B9, tl.uint32)
    first = tl.full(index.shape, 0x7FEB352D, tl.uint32)
    second = tl.full(index.shape, 0x846CA68B, tl.uint32)
    third = tl.full(index.shape, 0xC2B2AE35, tl.uint32)
    x = (index.to(tl.uint32) ^ key_0.to(tl.uint32)) + (index >> 32).to(tl.uint32) * high
    x = mixed(mixed(x, 16, first), 15, second)
    x = x ^ (x >> 16)
    y = mixed(x + (key_0 >> 32).to(tl.uint32), 15, third)
    return (x ^ key_1.to(tl.uint32)) | 1, ((y ^ (y >> 16)) ^ (key_1 >> 32).to(tl.uint32)) | 1


@triton.jit
def weighed(key, words):
    """key * word, 64 bits of it; words are signed integers of any width, whose bits count."""
    if words.dtype == tl.int16:
        bits = words.to(tl.uint16, bitcast=True)
    elif words.dtype == tl.int32:
        bits = words.to(tl.uint32, bitcast=True)
    else:
        bits = words
    return key.to(tl.uint64) * bits.to(tl.uint64)


@triton.jit(do_not_specialize=["num_tiles"])
def digest_tiles_kernel(
    words_0_ptr, words_1_ptr, words_2_ptr, table_ptr, tiles_ptr, out_ptr, num_tiles,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[tensor, tile, lane] for up to three tensors, which share the keys."""
    tile = tl.program_id(0).to(tl.int64)
    facts_ptr = table_ptr + tl.load(tiles_ptr + 2 * tile) * 5
    begin = tl.load(tiles_ptr + 2 * tile + 1)
    offset, length, start = tl.load(facts_ptr), tl.load(facts_ptr + 1), tl.load(facts_ptr + 2)
    key_0, key_1 = tl.load(facts_ptr + 3), tl.load(facts_ptr + 4)
    zero = tl.zeros((BLOCK,), tl.uint64)
    a0, a1, b0, b1, c0, c1 = zero, zero, zero, zero, zero, zero
    for block in range(0, TILE, BLOCK):
        index = begin + block + tl.arange(0, BLOCK)
        inside = index < length
        even, odd = word_keys(start + index, key_0, key_1)
        a = tl.load(words_0_ptr + offset + index, mask=inside, other=0)
        a0 += weighed(even, a)
        a1 += weighed(odd, a)
        if COUNT > 1:
            b = tl.load(words_1_ptr + offset + index, mask=inside, other=0)
            b0 += weighed(even, b)
            b1 += weighed(odd, b)
        if COUNT > 2:
            c = tl.load(words_2_ptr + offset + index, mask=inside, other=0)
            c0 += weighed(even, c)
            c1 += weighed(odd, c)
    store_pair(out_ptr + 2 * tile, a0, a1)
    if COUNT > 1:
        store_pair(out_ptr + 2 * (num_tiles + tile), b0, b1)
    if COUNT > 2:
        store_pair(out_ptr + 2 * (2 * num_tiles + tile), c0, c1)


@triton.jit
def store_pair(out_ptr, lane_0, lane_1):
    """The sums of two vectors, next to one another."""
    tl.store(out_ptr, tl.sum(lane_0, 0).to(tl.int64, bitcast=True))
    tl.store(out_ptr + 1, tl.sum(lane_1, 0).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["num_tiles", "num_pieces"])
def sum_tiles_kernel(tiles_ptr, first_ptr, out_ptr, num_tiles, num_pieces, LONGEST: tl.constexpr, BLOCK: tl.constexpr):
    """out[tensor, piece, lane] = the sum over the piece's tiles, ``LONGEST`` at most; one program each."""
    piece, tensor, lane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, last = tl.load(first_ptr + piece), tl.load(first_ptr + piece + 1)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(0, LONGEST, BLOCK):
        tile = first + block + tl.arange(0, BLOCK)
        total += tl.load(tiles_ptr + 2 * (tensor * num_tiles + tile) + lane, mask=tile < last, other=0)
    tl.store(out_ptr + 2 * (tensor * num_pieces + piece) + lane, tl.sum(total, 0))
