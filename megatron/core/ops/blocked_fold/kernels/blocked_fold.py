# Order of addition: left to right inside blocks of slots, then block sums left to right; first terms are copied.
"""The blocked fold in one pass over the slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocked_fold_kernel(slots, out_ptr, numel, GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """out[i] = the fold over a tuple of slots in blocks of GROUP, in the type WIDE; every term is read once."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    total = tl.load(slots[0] + index, mask=inside, other=0.0).to(WIDE)
    part = total
    for slot in tl.static_range(1, len(slots)):
        term = tl.load(slots[slot] + index, mask=inside, other=0.0).to(WIDE)
        part = term if slot % GROUP == 0 else part + term
        if slot % GROUP == GROUP - 1 or slot == len(slots) - 1:
            total = part if slot < GROUP else total + part
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)
