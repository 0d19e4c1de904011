# Order of addition: none across elements; products and sums are rounded one by one (launched without fusion).
"""One AdamW step of flat fp32 pieces in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam_step_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, numel,
    clip_factor, beta1, beta1_rest, beta2, beta2_rest, root_correction, eps, step_size, decay, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads four streams and writes three."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0) * clip_factor
    first = tl.load(exp_avg_ptr + index, mask=inside, other=0.0) * beta1 + grad * beta1_rest
    second = tl.load(exp_avg_sq_ptr + index, mask=inside, other=0.0) * beta2 + grad * grad * beta2_rest
    root = tl.div_rn(tl.sqrt_rn(second), root_correction) + eps
    update = tl.div_rn(first * step_size, root)
    param = tl.load(param_ptr + index, mask=inside, other=0.0) * decay - update
    tl.store(exp_avg_ptr + index, first, mask=inside)
    tl.store(exp_avg_sq_ptr + index, second, mask=inside)
    tl.store(param_ptr + index, param, mask=inside)
