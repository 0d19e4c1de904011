# Order of addition: none; the keep mask is integer arithmetic on global indices.
"""Dropout whose mask is Philox4x32-10 of (key, global element index): the bits of megatron.core.ops.philox."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(block, k0, k1):
    """The four words Philox4x32-10 makes of counter (block low, block high, 0, 0); uint32."""
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + k0.to(tl.uint32)
    k1 = tl.zeros_like(c0) + k1.to(tl.uint32)
    w0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
    w1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        # One 64-bit product where a high and a low half would be two instructions.
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 += w0
        k1 += w1
    return c0, c1, c2, c3


@triton.jit(do_not_specialize=["k0", "k1"])
def dropout_kernel(
    x_ptr, out_ptr, rows, pieces, n1, n2, n3, g0, g1, g2, start, k0, k1, threshold, scale,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x * scale where the element's word is at least ``threshold``, else +0.0.

    Element (i0, i1, i2, i3) of the box (extents n0..n3) has the global index start + i0 g0 + i1 g1 + i2 g2 + i3. A row
    is what i3 runs over. ALIGNED: rows start at multiples of 4, so that a Philox block serves four neighbours.
    """
    row = (tl.program_id(0) // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < n3)[None, :]
    place = start + (row // (n2 * n1)) * g0 + (row // n2 % n1) * g1 + (row % n2) * g2
    if ALIGNED:
        four = ((place + first) >> 2)[:, None] + tl.arange(0, BLOCK // 4)[None, :]
        w0, w1, w2, w3 = philox(four, k0, k1)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, BLOCK))
    else:
        index = place[:, None] + column[None, :]
        w0, w1, w2, w3 = philox(index >> 2, k0, k1)
        which = index & 3
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    x = tl.load(x_ptr + row[:, None] * n3 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.where(word.to(tl.int64) >= threshold, x * scale, 0.0)
    tl.store(out_ptr + row[:, None] * n3 + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
