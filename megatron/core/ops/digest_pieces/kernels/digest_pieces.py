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
def keys_of(low, high, key_0, key_1):
    """Both odd keys of words of a shard, as digest_pieces/definition.py makes them, from the low halves of their
    indices and what the high halves add; uint32."""
    first = tl.full(low.shape, 0x7FEB352D, tl.uint32)
    second = tl.full(low.shape, 0x846CA68B, tl.uint32)
    third = tl.full(low.shape, 0xC2B2AE35, tl.uint32)
    x = (low ^ key_0.to(tl.uint32)) + high
    x = mixed(mixed(x, 16, first), 15, second)
    x = x ^ (x >> 16)
    y = mixed(x + (key_0 >> 32).to(tl.uint32), 15, third)
    return (x ^ key_1.to(tl.uint32)) | 1, ((y ^ (y >> 16)) ^ (key_1 >> 32).to(tl.uint32)) | 1


@triton.jit
def word_keys(index, key_0, key_1):
    """Both odd keys of the words ``index`` of a shard; uint32."""
    high = (index >> 32).to(tl.uint32) * tl.full(index.shape, 0x9E3779B9, tl.uint32)
    return keys_of(index.to(tl.uint32), high, key_0, key_1)


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


@triton.jit
def weighed_sums(even, odd, words):
    """The words times both keys, four neighbours added up: they are in one thread's registers."""
    a, b = weighed(even, words), weighed(odd, words)
    FOURS: tl.constexpr = words.shape[0] // 4
    return tl.sum(tl.reshape(a, (FOURS, 4)), 1), tl.sum(tl.reshape(b, (FOURS, 4)), 1)


@triton.jit(do_not_specialize=["num_tiles"])
def digest_tiles_kernel(
    words_0_ptr, words_1_ptr, words_2_ptr, table_ptr, tiles_ptr, out_ptr, num_tiles,
    COUNT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[tensor, tile, lane] for up to three tensors, which share the keys. ALIGNED divides all offsets."""
    tile = tl.program_id(0).to(tl.int64)
    facts_ptr = table_ptr + tl.load(tiles_ptr + 2 * tile) * 5
    begin = tl.multiple_of(tl.load(tiles_ptr + 2 * tile + 1), BLOCK)
    offset = tl.multiple_of(tl.load(facts_ptr), ALIGNED)
    length, start = tl.load(facts_ptr + 1), tl.load(facts_ptr + 2)
    key_0, key_1 = tl.load(facts_ptr + 3), tl.load(facts_ptr + 4)
    zero = tl.zeros((BLOCK // 4,), tl.uint64)
    a0, a1, b0, b1, c0, c1 = zero, zero, zero, zero, zero, zero
    first = start + begin
    if (begin + TILE <= length) & ((first >> 32) == ((first + TILE) >> 32)):
        # A whole tile, whose indices have one high half: no masks, 32-bit arithmetic.
        high = (first >> 32).to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)
        for block in range(0, TILE, BLOCK):
            step = block + tl.arange(0, BLOCK)
            at = offset + begin + step
            even, odd = keys_of(first.to(tl.uint32) + step.to(tl.uint32), high, key_0, key_1)
            even_sum, odd_sum = weighed_sums(even, odd, tl.load(words_0_ptr + at))
            a0, a1 = a0 + even_sum, a1 + odd_sum
            if COUNT > 1:
                even_sum, odd_sum = weighed_sums(even, odd, tl.load(words_1_ptr + at))
                b0, b1 = b0 + even_sum, b1 + odd_sum
            if COUNT > 2:
                even_sum, odd_sum = weighed_sums(even, odd, tl.load(words_2_ptr + at))
                c0, c1 = c0 + even_sum, c1 + odd_sum
    else:
        for block in range(0, TILE, BLOCK):
            index = begin + block + tl.arange(0, BLOCK)
            inside = index < length
            even, odd = word_keys(start + index, key_0, key_1)
            even_sum, odd_sum = weighed_sums(even, odd, tl.load(words_0_ptr + offset + index, mask=inside, other=0))
            a0, a1 = a0 + even_sum, a1 + odd_sum
            if COUNT > 1:
                words = tl.load(words_1_ptr + offset + index, mask=inside, other=0)
                even_sum, odd_sum = weighed_sums(even, odd, words)
                b0, b1 = b0 + even_sum, b1 + odd_sum
            if COUNT > 2:
                words = tl.load(words_2_ptr + offset + index, mask=inside, other=0)
                even_sum, odd_sum = weighed_sums(even, odd, words)
                c0, c1 = c0 + even_sum, c1 + odd_sum
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
