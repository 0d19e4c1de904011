# Order of addition: none; wrapping sums of integers are exact in any order.
"""Digests by row: a program has one part of a run of rows, and reads it in tiles of rows and words."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.digest_words.kernels.digest_words import mix, position_keys, unsigned


@triton.jit(do_not_specialize=["address", "out_address", "stride", "rows", "width", "length", "part", "splits"])
def digest_rows_kernel(
    address: tl.int64, out_address: tl.int64, stride: tl.int64,
    rows: tl.int64, width: tl.int64, length: tl.int64, part: tl.int64, splits: tl.int64,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """out[line, part] for rows ``run * length + split * part ...``. ``ALIGNED``: the rows begin at multiples of 16
    bytes, and ``width`` counts groups of 4 words."""
    program = tl.program_id(0).to(tl.int64)
    run, split = program // splits, program % splits
    start = run * length + split * part
    stop = tl.minimum(tl.minimum((split + 1) * part, length) + run * length, rows)
    # Interpreted, an address below 2^31 is an int32, which is no pointer; compiled it has the type above.
    words_ptr = address.to(tl.int64).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        words_ptr = tl.multiple_of(words_ptr, 16)
        width = width * 4
    of_row = tl.full((ROWS,), -0x2917014799A6026D, tl.int64)
    without, ordered = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64)
    first_row = start
    while first_row < stop:
        row = first_row + tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, WORDS), tl.uint64)
        first_word = width * 0
        while first_word < width:
            word = first_word + tl.arange(0, WORDS).to(tl.int64)
            inside = (row < stop)[:, None] & (word < width)[None, :]
            value = unsigned(tl.load(words_ptr + row[:, None] * width + word[None, :], mask=inside, other=0))
            sums += value * (position_keys(word) | 1).to(tl.uint64, bitcast=True)[None, :]
            first_word += WORDS
        total = tl.sum(sums.to(tl.int64, bitcast=True), 1)
        without += tl.where(row < stop, mix(total, of_row), 0)
        ordered += tl.where(row < stop, mix(total + position_keys(row), of_row), 0)
        first_row += ROWS
    out_ptr = out_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + program
    tl.store(out_ptr, tl.sum(without, 0))
    tl.store(out_ptr + stride, tl.sum(ordered, 0))
