"""``router_weights`` in one launch each way; nothing is kept for the backward but the arguments."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_weights.kernels.router_weights import router_weights_bwd_kernel, router_weights_fwd_kernel


def _backward_rule(experts: int) -> Config:
    """1,024 places of the gradient per program at least, where a row has fewer, and 64 rows at most."""
    return {"ROWS": min(64, max(1, 1024 // power_of_two(experts))), "num_warps": 4}


FORWARD = Launch(
    kernel="router_weights_fwd",
    rule=lambda _: {"ROWS": 64, "num_warps": 2},
    choices={"ROWS": (32, 64, 128, 256), "num_warps": (1, 2, 4)},
)
"""A thread takes a row; by the number of choices."""
BACKWARD = Launch(
    kernel="router_weights_bwd",
    rule=_backward_rule,
    choices={"ROWS": (1, 2, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
)


class _RouterWeights(Node):
    @staticmethod
    def forward(ctx, score_TE: torch.Tensor, ids_Tk: torch.Tensor, normalise: bool, factor: float | None):
        ctx.save_for_backward(score_TE, ids_Tk)
        ctx.normalise, ctx.factor = normalise, factor
        tokens, k = ids_Tk.shape
        weight_Tk = score_TE.new_empty(tokens, k)
        if weight_Tk.numel():
            launch = FORWARD.config(score_TE.device, k)
            run_kernel(
                router_weights_fwd_kernel, (cdiv(tokens, launch["ROWS"]),),
                score_TE, ids_Tk, weight_Tk, tokens, *score_TE.stride(), 1.0 if factor is None else factor,
                K=k, NORMALISE=normalise, **launch,
            )  # fmt: skip
        return weight_Tk

    @staticmethod
    def backward(ctx, grad_Tk: torch.Tensor):
        score_TE, ids_Tk = ctx.saved_tensors
        tokens, experts = score_TE.shape
        dscore_TE = score_TE.new_empty(tokens, experts)
        if dscore_TE.numel():
            launch = BACKWARD.config(score_TE.device, experts)
            run_kernel(
                router_weights_bwd_kernel, (cdiv(tokens, launch["ROWS"]),),
                score_TE, ids_Tk, grad_Tk.contiguous(), dscore_TE, tokens, experts, *score_TE.stride(),
                1.0 if ctx.factor is None else ctx.factor,
                K=ids_Tk.shape[1], NORMALISE=ctx.normalise, BLOCK_E=power_of_two(experts), **launch,
            )  # fmt: skip
        return dscore_TE, None, None, None


def router_weights(score_TE: torch.Tensor, ids_Tk: torch.Tensor, normalise: bool, factor: float | None) -> torch.Tensor:
    """Same contract as the reference; scores are read where they lie."""
    return _RouterWeights.apply(score_TE, ids_Tk.contiguous(), normalise, factor)


VARIANT = Variant(
    name="deterministic_triton",
    fn=router_weights,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="One thread adds a row's choices, ascending; every place of the gradient is written once, by one program.",
    sources=(
        "megatron.core.ops.router_weights.kernels.router_weights",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
