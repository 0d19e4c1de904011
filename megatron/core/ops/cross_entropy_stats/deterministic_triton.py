"""``cross_entropy_stats`` as one Triton kernel that reads the logits once."""

from __future__ import annotations

import torch

from megatron.core.ops.cross_entropy_stats.kernels.cross_entropy_stats import cross_entropy_stats_kernel
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, piece_rule, rows_of
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="cross_entropy_stats",
    rule=piece_rule(8192, per_warp=512, max_warps=8),
    choices={"BLOCK": (2048, 4096, 8192), "num_warps": (4, 8, 16)},
    new_bits=frozenset({"BLOCK", "num_warps"}),
)


def cross_entropy_stats(
    logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same contract as the reference."""
    logits_TV = rows_of(logits_TV.detach())
    max_T, sum_exp_T, picked_T = torch.empty(3, logits_TV.shape[0], device=logits_TV.device).unbind()
    if logits_TV.shape[0]:
        run_kernel(
            cross_entropy_stats_kernel, (logits_TV.shape[0],),
            logits_TV, target_T.contiguous(), max_T, sum_exp_T, picked_T, num_valid, logits_TV.stride(0),
            **LAUNCH.config(logits_TV.device, num_valid),
        )  # fmt: skip
    return max_T, sum_exp_T, picked_T


VARIANT = Variant(
    name="deterministic_triton",
    fn=cross_entropy_stats,
    guarantee={"cuda": Guarantee.BATCH},
    why="One program adds a token's blocks in ascending order.",
    sources=(
        "megatron.core.ops.cross_entropy_stats.kernels.cross_entropy_stats",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
