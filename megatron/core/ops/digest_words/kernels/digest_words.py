# Order of addition: none; wrapping sums of integers are exact in any order.
"""The digest of traces for up to four tensors: every slot is one program, which reads its tiles one after the other."""

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
    """64 bits for each index."""
    step = tl.full(index.shape, -0x61C8864680B583EB, tl.int64)
    first = tl.full(index.shape, -0x40A7B892E31B1A47, tl.int64)
    second = tl.full(index.shape, -0x6B2FB644ECCEEE15, tl.int64)
    return mix(index * step + first, second)


@triton.jit
def place_keys(place):
    """Odd keys of both lanes for the places in a tile."""
    key = position_keys(place)
    return key | 1, mix(key, tl.full(place.shape, -0x2917014799A6026D, tl.int64)) | 1


@triton.jit
def tile_keys(tile):
    """Odd 32-bit keys of both lanes for a tile, as 64-bit numbers."""
    key = position_keys(tile.to(tl.int64) - 4294967296).to(tl.uint64, bitcast=True)
    low = tl.full(key.shape, 0xFFFFFFFF, tl.uint64)
    return (key & low) | 1, (key >> 32) | 1


@triton.jit
def unsigned(words):
    """32 bits as a 64-bit number."""
    return words.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def one_of(number, a, b, c, d):
    """The value with this number."""
    return tl.where(number < 1, a, tl.where(number < 2, b, tl.where(number < 3, c, d)))


@triton.jit(
    do_not_specialize=[
        "out_address", "stride", "address_0", "address_1", "address_2", "address_3",
        "bytes_0", "bytes_1", "bytes_2", "bytes_3", "end_0", "end_1", "end_2", "end_3",
    ]
)  # fmt: skip
def digest_words_kernel(
    out_address: tl.int64, stride: tl.int64,
    address_0: tl.int64, address_1: tl.int64, address_2: tl.int64, address_3: tl.int64,
    bytes_0: tl.int64, bytes_1: tl.int64, bytes_2: tl.int64, bytes_3: tl.int64,
    end_0: tl.int32, end_1: tl.int32, end_2: tl.int32, end_3: tl.int32,
    ALIGNED: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[lane, program]; programs ``end_(i - 1) ... end_i`` are the slots of tensor i.

    ``ALIGNED``: all begin at a multiple of 16 bytes. ``TAIL``: a last word is short and read byte by byte.
    """
    program = tl.program_id(0)
    number = (program >= end_0).to(tl.int32) + (program >= end_1).to(tl.int32) + (program >= end_2).to(tl.int32)
    address = one_of(number, address_0, address_1, address_2, address_3).to(tl.int64)
    num_bytes = one_of(number, bytes_0, bytes_1, bytes_2, bytes_3).to(tl.int64)
    begin = one_of(number, 0, end_0, end_1, end_2)
    slot = program - begin
    slots = one_of(number, end_0, end_1, end_2, end_3) - begin
    whole = num_bytes // 4
    groups = (whole // (TILE * GROUP)).to(tl.int32)
    place = tl.arange(0, TILE)
    words_ptr = address.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        words_ptr = tl.multiple_of(words_ptr, 16)
    first, second = tl.zeros((TILE,), tl.uint64), tl.zeros((TILE,), tl.uint64)
    group = slot
    while group < groups:
        tile = group.to(tl.int64) * GROUP
        here_ptr = words_ptr + tile * TILE
        a = unsigned(tl.load(here_ptr + place))
        b = unsigned(tl.load(here_ptr + TILE + place))
        c = unsigned(tl.load(here_ptr + 2 * TILE + place))
        d = unsigned(tl.load(here_ptr + 3 * TILE + place))
        a0, a1 = tile_keys(tile)
        b0, b1 = tile_keys(tile + 1)
        c0, c1 = tile_keys(tile + 2)
        d0, d1 = tile_keys(tile + 3)
        first += a0 * a + b0 * b + c0 * c + d0 * d
        second += a1 * a + b1 * b + c1 * c + d1 * d
        group += slots
    # What is left of a group; nobody has more than one of these.
    mine = groups % slots == slot
    until = tl.where(mine, whole, 0)
    for step in range(GROUP):
        tile = groups.to(tl.int64) * GROUP + step
        at = tile * TILE + place
        words = unsigned(tl.load(words_ptr + at, mask=at < until, other=0))
        tile_0, tile_1 = tile_keys(tile)
        first += tile_0 * words
        second += tile_1 * words
    if TAIL:
        inside = place < tl.where(mine, num_bytes % 4, 0)
        tail = tl.load(address.to(tl.pointer_type(tl.uint8)) + whole * 4 + place, mask=inside, other=0)
        word = tl.sum(tail.to(tl.uint64) << tl.where(inside, 8 * place, 0).to(tl.uint64), 0)
        tile_0, tile_1 = tile_keys(whole // TILE)
        there = place == whole % TILE
        first += tl.where(there, tile_0 * word, 0)
        second += tl.where(there, tile_1 * word, 0)
    keys_0, keys_1 = place_keys(place.to(tl.int64))
    out_ptr = out_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + program
    tl.store(out_ptr, tl.sum(first.to(tl.int64, bitcast=True) * keys_0, 0))
    tl.store(out_ptr + stride, tl.sum(second.to(tl.int64, bitcast=True) * keys_1, 0))
