# Order of addition: none; wrapping sums of integers are exact in any order.
"""Digests by row: a program has one part of a run of rows, and reads it in tiles of rows and words."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.digest_words.kernels.digest_words import mix, position_keys


@triton.jit(do_not_specialize=["rows", "width", "length", "part", "splits", "parts"])
def digest_rows_kernel(
    words_ptr, out_ptr, rows, width, length, part, splits, parts,
    ROW_TURNS: tl.constexpr, WORD_TURNS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """out[line, part] for rows ``run * length + split * part ...``."""
    place = tl.program_id(0).to(tl.int64)
    run, split = place // splits, place % splits
    stop = tl.minimum(tl.minimum((split + 1) * part, length) + run * length, rows)
    first = tl.full((ROWS, WORDS), -0x40A7B892E31B1A47, tl.int64)
    of_row = tl.full((ROWS,), -0x2917014799A6026D, tl.int64)
    without, ordered = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64)
    for row_turn in range(ROW_TURNS):
        row = run * length + split * part + row_turn * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS,), tl.int64)
        for word_turn in range(WORD_TURNS):
            word = (word_turn * WORDS + tl.arange(0, WORDS)).to(tl.int64)
            inside = (row < stop)[:, None] & (word < width)[None, :]
            value = tl.load(words_ptr + row[:, None] * width + word[None, :], mask=inside, other=0)
            total += tl.sum(tl.where(inside, mix(value ^ position_keys(word)[None, :], first), 0), 1)
        without += tl.where(row < stop, mix(total, of_row), 0)
        ordered += tl.where(row < stop, mix(total + position_keys(row), of_row), 0)
    tl.store(out_ptr + place, tl.sum(without, 0))
    tl.store(out_ptr + parts + place, tl.sum(ordered, 0))
