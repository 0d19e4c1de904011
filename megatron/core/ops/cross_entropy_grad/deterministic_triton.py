"""``cross_entropy_grad`` as one Triton kernel: no fp32 copy of the logits."""

from __future__ import annotations

import torch

from megatron.core.ops.cross_entropy_grad.kernels.cross_entropy_grad import cross_entropy_grad_kernel
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, cdiv, piece_rule, rows_of
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="cross_entropy_grad",
    rule=piece_rule(4096, per_warp=512, max_warps=8),
    choices={"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8)},
)


def cross_entropy_grad(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int, log_z_T: torch.Tensor, dloss_T: torch.Tensor
) -> torch.Tensor:
    """Same contract as the reference."""
    logits_TV = rows_of(logits_TV.detach())
    tokens, width = logits_TV.shape
    dlogits_TV = logits_TV.new_empty(tokens, width)
    if dlogits_TV.numel():
        launch = LAUNCH.config(logits_TV.device, width)
        run_kernel(
            cross_entropy_grad_kernel, (tokens, cdiv(width, launch["BLOCK"])),
            logits_TV, target_T.contiguous(), log_z_T.contiguous(), dloss_T.contiguous(), dlogits_TV, num_valid,
            width, logits_TV.stride(0),
            **launch,
        )  # fmt: skip
    return dlogits_TV


VARIANT = Variant(
    name="deterministic_triton",
    fn=cross_entropy_grad,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise.",
    sources=(
        "megatron.core.ops.cross_entropy_grad.kernels.cross_entropy_grad",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
