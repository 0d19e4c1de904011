# Order of addition: none; elementwise.
"""Gradient of the cross entropy with respect to the logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_grad_kernel(
    logits_ptr, target_ptr, log_z_ptr, dloss_ptr, dlogits_ptr, num_valid, width, stride, BLOCK: tl.constexpr
):
    """(exp(logit - log_z) - [v is target]) * dloss, and zeros from num_valid on."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + token * stride + column, mask=column < num_valid, other=0.0).to(tl.float32)
    value = tl.exp(logit - tl.load(log_z_ptr + token))
    value = tl.where(column == tl.load(target_ptr + token), value - 1.0, value) * tl.load(dloss_ptr + token)
    value = tl.where(column < num_valid, value, 0.0)
    tl.store(dlogits_ptr + token * width + column, value.to(dlogits_ptr.dtype.element_ty), mask=column < width)
