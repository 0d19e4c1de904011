"""``router_topk`` as one kernel: no sort, and nothing between score and ids is written."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.launch import power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_topk.kernels.router_topk import router_topk_kernel

TILE = 1024
"""Scores per program at least, where a row has fewer."""


def router_topk(score_TE: torch.Tensor, bias_E: torch.Tensor | None, k: int) -> torch.Tensor:
    """Same contract as the reference."""
    tokens, experts = score_TE.shape
    if not 0 <= k <= experts:
        raise ValueError(f"cannot choose {k} of {experts} experts")
    ids_Tk = torch.empty(tokens, k, dtype=torch.int64, device=score_TE.device)
    if not ids_Tk.numel():
        return ids_Tk
    score_TE = score_TE.detach() if score_TE.stride(1) == 1 else score_TE.detach().contiguous()
    block = power_of_two(experts)
    rows = max(1, TILE // block)
    router_topk_kernel[(triton.cdiv(tokens, rows),)](
        score_ptr=score_TE,
        bias_ptr=score_TE if bias_E is None else bias_E.detach().contiguous(),
        ids_ptr=ids_Tk,
        tokens=tokens,
        experts=experts,
        stride=score_TE.stride(0),
        K=k,
        HAS_BIAS=bias_E is not None,
        ROWS=rows,
        BLOCK_E=block,
        num_warps=4,
    )
    return ids_Tk


VARIANT = Variant(
    name="deterministic_triton",
    fn=router_topk,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="One fp32 addition per element; keys are distinct integers, so the choice does not depend on any order.",
    sources=("megatron.core.ops.router_topk.kernels.router_topk", "megatron.core.ops.launch"),
)
