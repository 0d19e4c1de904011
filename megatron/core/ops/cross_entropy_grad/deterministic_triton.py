"""``cross_entropy_grad`` as one Triton kernel: no fp32 copy of the logits."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.cross_entropy_grad.kernels.cross_entropy_grad import cross_entropy_grad_kernel
from megatron.core.ops.launch import power_of_two, rows_of
from megatron.core.ops.registry import Guarantee, Variant

MAX_BLOCK = 4096


def cross_entropy_grad(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int, log_z_T: torch.Tensor, dloss_T: torch.Tensor
) -> torch.Tensor:
    """Same contract as the reference."""
    logits_TV = rows_of(logits_TV.detach())
    tokens, width = logits_TV.shape
    dlogits_TV = torch.empty(tokens, width, dtype=logits_TV.dtype, device=logits_TV.device)
    if dlogits_TV.numel():
        block = min(MAX_BLOCK, power_of_two(width))
        cross_entropy_grad_kernel[(tokens, triton.cdiv(width, block))](
            logits_ptr=logits_TV,
            target_ptr=target_T.contiguous(),
            log_z_ptr=log_z_T.contiguous(),
            dloss_ptr=dloss_T.contiguous(),
            dlogits_ptr=dlogits_TV,
            num_valid=num_valid,
            width=width,
            stride=logits_TV.stride(0),
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )
    return dlogits_TV


VARIANT = Variant(
    name="deterministic_triton",
    fn=cross_entropy_grad,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise.",
    sources=("megatron.core.ops.cross_entropy_grad.kernels.cross_entropy_grad", "megatron.core.ops.launch"),
)
