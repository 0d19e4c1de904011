"""``router_weights`` with an explicit backward that writes each place of the gradient once."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.registry import Guarantee, Variant


class _RouterWeights(Node):
    @staticmethod
    def forward(ctx, score_TE, ids_Tk, normalise, factor):
        weight_Tk, total_T1 = score_TE.gather(1, ids_Tk), None
        ctx.num_experts, ctx.factor = score_TE.shape[1], factor
        if normalise:
            total_T1 = weight_Tk.sum(dim=-1, keepdim=True) + 1e-20
        ctx.save_for_backward(ids_Tk, weight_Tk if normalise else None, total_T1)
        if total_T1 is not None:
            weight_Tk = weight_Tk / total_T1
        return weight_Tk if factor is None else weight_Tk * factor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_Tk):
        ids_Tk, taken_Tk, total_T1 = ctx.saved_tensors
        if ctx.factor is not None:
            grad_Tk = grad_Tk * ctx.factor
        if total_T1 is not None:
            along_T1 = (-grad_Tk * (taken_Tk / total_T1 / total_T1)).sum(dim=-1, keepdim=True)
            grad_Tk = grad_Tk / total_T1 + along_T1
        return grad_Tk.new_zeros(ids_Tk.shape[0], ctx.num_experts).scatter_(1, ids_Tk, grad_Tk), None, None, None


def router_weights(score_TE: torch.Tensor, ids_Tk: torch.Tensor, normalise: bool, factor: float | None) -> torch.Tensor:
    """See the reference."""
    return _RouterWeights.apply(score_TE, ids_Tk, normalise, factor)


VARIANT = Variant(
    name="deterministic",
    fn=router_weights,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's sum of a row, which on the CPU does not depend on the other rows; all else is elementwise.",
)
