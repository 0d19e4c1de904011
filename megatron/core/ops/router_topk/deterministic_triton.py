"""``router_topk`` as one kernel: no sort, and nothing between score and ids is written."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_topk.kernels.router_topk import router_topk_kernel


def _rule(experts: int) -> Config:
    """1,024 scores per program at least, where a row has fewer."""
    return {"ROWS": max(1, 1024 // power_of_two(experts)), "num_warps": 4}


LAUNCH = Launch(kernel="router_topk", rule=_rule, choices={"ROWS": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)})


def router_topk(score_TE: torch.Tensor, bias_E: torch.Tensor | None, k: int) -> torch.Tensor:
    """Same contract as the reference."""
    tokens, experts = score_TE.shape
    if not 0 <= k <= experts:
        raise ValueError(f"cannot choose {k} of {experts} experts")
    ids_Tk = score_TE.new_empty(tokens, k, dtype=torch.int64)
    if not ids_Tk.numel():
        return ids_Tk
    score_TE = score_TE if score_TE.stride(1) == 1 else score_TE.contiguous()
    launch = LAUNCH.config(score_TE.device, experts)
    run_kernel(
        router_topk_kernel, (cdiv(tokens, launch["ROWS"]),),
        score_TE, score_TE if bias_E is None else bias_E.contiguous(), ids_Tk, tokens, experts,
        score_TE.stride(0),
        K=k, HAS_BIAS=bias_E is not None, BLOCK_E=power_of_two(experts), **launch,
    )  # fmt: skip
    return ids_Tk


VARIANT = Variant(
    name="deterministic_triton",
    fn=router_topk,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="One fp32 addition per element; keys are distinct integers, so the choice does not depend on any order.",
    sources=(
        "megatron.core.ops.router_topk.kernels.router_topk",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
