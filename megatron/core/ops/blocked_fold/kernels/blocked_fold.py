# Order of addition: left to right inside blocks of slots, then block sums left to right; first terms are copied.
"""The blocked fold in one pass over the slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocked_fold_kernel(
    slots_ptr, out_ptr, numel, stride, SLOTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = the fold over SLOTS slots in blocks of GROUP; every term is read once."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    total = tl.load(slots_ptr + index, mask=inside, other=0.0).to(out_ptr.dtype.element_ty)
    part = total
    for slot in tl.static_range(1, SLOTS):
        term = tl.load(slots_ptr + slot * stride + index, mask=inside, other=0.0).to(out_ptr.dtype.element_ty)
        part = term if slot % GROUP == 0 else part + term
        if slot % GROUP == GROUP - 1 or slot == SLOTS - 1:
            total = part if slot < GROUP else total + part
    tl.store(out_ptr + index, total, mask=inside)
