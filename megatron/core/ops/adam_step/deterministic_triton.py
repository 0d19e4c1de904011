"""``adam_step`` as one Triton kernel."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.adam_step.kernels.adam_step import adam_step_kernel
from megatron.core.ops.adam_step.scalars import AdamScalars
from megatron.core.ops.launch import Launch
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="adam_step",
    rule=lambda: {"BLOCK": 1024, "num_warps": 4},
    choices={"BLOCK": (512, 1024, 2048, 4096), "num_warps": (4, 8)},
)


def adam_step(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: AdamScalars
) -> None:
    """Same contract as the reference.

    Raises:
        ValueError: a tensor is not fp32, not contiguous, or not as long as the others.
    """
    for tensor in (param, grad, exp_avg, exp_avg_sq):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != param.numel():
            raise ValueError(f"adam_step takes equally long contiguous fp32 tensors, not {tensor.dtype} {tensor.shape}")
    if not param.numel():
        return
    launch = LAUNCH.config(param.device)
    adam_step_kernel[(triton.cdiv(param.numel(), launch["BLOCK"]),)](
        param_ptr=param.detach(),
        grad_ptr=grad.detach(),
        exp_avg_ptr=exp_avg,
        exp_avg_sq_ptr=exp_avg_sq,
        numel=param.numel(),
        clip_factor=float(scalars.clip_factor),
        beta1=scalars.beta1,
        beta1_rest=1.0 - scalars.beta1,
        beta2=scalars.beta2,
        beta2_rest=1.0 - scalars.beta2,
        root_correction=scalars.root_correction,
        eps=scalars.eps,
        step_size=scalars.step_size,
        decay=scalars.decay,
        **launch,
        enable_fp_fusion=False,
    )


VARIANT = Variant(
    name="deterministic_triton",
    fn=adam_step,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other; fused multiply-add is off.",
    sources=(
        "megatron.core.ops.adam_step.kernels.adam_step",
        "megatron.core.ops.adam_step.scalars",
        "megatron.core.ops.launch",
    ),
)
