# Order of addition: none; the keep mask is integer arithmetic on global indices.
"""Dropout whose mask is Philox4x32-10 of (key, global element index): the bits of megatron.core.ops.philox."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_word(index, k0, k1):
    """First of the four words Philox4x32-10 makes of counter (index low, index high, 0, 0); uint32."""
    c0 = (index & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + k0.to(tl.uint32)
    k1 = tl.zeros_like(c0) + k1.to(tl.uint32)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    w0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
    w1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += w0
        k1 += w1
    return c0


@triton.jit(do_not_specialize=["k0", "k1"])
def dropout_kernel(x_ptr, out_ptr, numel, n1, n2, n3, g0, g1, g2, start, k0, k1, threshold, scale, BLOCK: tl.constexpr):
    """out = x * scale where the element's word is at least ``threshold``, else +0.0.

    Element (i0, i1, i2, i3) of the box (extents n0..n3) has the global index start + i0 g0 + i1 g1 + i2 g2 + i3.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    i3 = index % n3
    i2 = (index // n3) % n2
    i1 = (index // (n3 * n2)) % n1
    i0 = index // (n3 * n2 * n1)
    place = start + i0 * g0 + i1 * g1 + i2 * g2 + i3
    keep = philox_word(place, k0, k1).to(tl.int64) >= threshold
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    out = tl.where(keep, x * scale, 0.0)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask=inside)
