"""Load-balancing loss of one MoE layer.

    loss = coeff * E / (k T^2) * sum_e P_e * count_e

P_e sums the normalised score of expert e over the T tokens, count_e is how many tokens have e among their k best
normalised scores, without the expert bias. ``aux_loss`` takes a micro-batch's tokens together, ``seq_aux_loss`` every
sequence by itself and the mean over sequences. Counts are summed over the tensor-parallel ranks as integers; P of a
rank's own positions is all its gradient needs. Nothing depends on other micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch
from megatron.core.process_groups.collectives import sum_integers
from megatron.core.tensor_parallel.context import ModelContext


class _AttachLoss(torch.autograd.Function):
    """Identity on ``x`` that also differentiates ``loss``, with weight ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.one = scale, torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.one * ctx.scale, None


def count_choices(ids_Tk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Boolean ``[T, E]``: expert e is among the choices of token t."""
    chosen_TE = torch.zeros(ids_Tk.shape[0], num_experts, dtype=torch.bool, device=ids_Tk.device)
    return chosen_TE.scatter_(1, ids_Tk, True)


class LoadBalancer:
    """The balancing loss the configuration asks for."""

    def __init__(self, config: TransformerConfig, context: ModelContext) -> None:
        kind = config.moe_router_load_balancing_type
        self.active = kind != "none" and config.moe_aux_loss_coeff != 0.0
        self.per_sequence = kind == "seq_aux_loss"
        self.coefficient = config.moe_aux_loss_coeff
        self.topk, self.num_experts = config.moe_router_topk, config.num_moe_experts
        self.softmax = config.moe_router_score_function == "softmax"
        self.context = context
        self._topk = context.ops["router_topk"]

    def _normalised(self, logits_TE: torch.Tensor, score_TE: torch.Tensor) -> torch.Tensor:
        if self.softmax:
            return torch.softmax(logits_TE, dim=-1)
        return score_TE / (score_TE.sum(dim=-1, keepdim=True) + 1e-20)

    def loss(self, logits_TE: torch.Tensor, score_TE: torch.Tensor, batch: int) -> torch.Tensor:
        """This rank's part (fp32 scalar) of the loss before its coefficient; the parts add up over the ranks.

        ``logits_TE`` and ``score_TE`` are fp32, tokens in (s, b) order with ``batch`` sequences.
        """
        p_TE = self._normalised(logits_TE, score_TE)
        chosen_TE = count_choices(self._topk(p_TE.detach(), None, self.topk), self.num_experts)
        sequences = batch if self.per_sequence else 1
        length = p_TE.shape[0] // sequences
        tokens = length * (self.context.groups.tp.size if self.context.cuts_sequence else 1)
        count_BE = chosen_TE.view(length, sequences, -1).sum(dim=0)
        if self.context.cuts_sequence:
            count_BE = sum_integers(self.context.groups.tp, count_BE)
        p_BE = p_TE.view(length, sequences, -1).sum(dim=0)
        factor = self.num_experts / (self.topk * float(tokens) ** 2 * sequences)
        return (p_BE * count_BE.to(torch.float32)).sum() * factor

    def attach(self, weight_Tk: torch.Tensor, loss: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """``weight_Tk`` unchanged; backward also differentiates coefficient * loss, with the weight that a mean over
        this micro-batch has."""
        return _AttachLoss.apply(weight_Tk, loss, microbatch.weight * (self.coefficient / microbatch.applications))
