"""Auxiliary losses of one MoE layer's router.

    balancing loss = coeff * E / (k T T') * sum_e P_e * count_e

P_e sums the normalised score of expert e over the T tokens of a micro-batch, count_e is how many of T' tokens have e
among their k best normalised scores, without the expert bias. ``aux_loss`` counts the micro-batch itself (T' = T),
``seq_aux_loss`` every sequence by itself and takes the mean over sequences, ``global_aux_loss`` counts this micro-batch
and the step's earlier ones on all data-parallel ranks. Several may be in effect at once.

    z-loss = coeff / T * sum_t logsumexp(logits_t)^2

Counts are summed over ranks as integers; P of a rank's own positions is all its gradient needs. All are means over a
micro-batch, and weigh as much as its mean token loss.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.config.moe import AUXILIARY_NAMES, Z_LOSS_NAME
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.node import Node
from megatron.core.process_groups.collectives import sum_integers
from megatron.core.tensor_parallel.context import ModelContext


class _AttachLoss(Node):
    """Identity on ``x`` that also differentiates ``loss``, with weight ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale = ctx.scale
        return grad, scale if isinstance(scale, torch.Tensor) else grad.new_full((), scale), None


class _GlobalCounts:
    """Tokens per expert in the step so far, over all ranks that share the router. Kept by micro-batch, so that a
    recomputed one gets the counts of its first forward."""

    def __init__(self, context: ModelContext) -> None:
        self._group = context.groups.tp_dp
        self._seen_1E: dict[tuple[int, int], torch.Tensor] = {}

    def up_to(self, count_1E: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """Counts of this micro-batch and the earlier ones of its step; ``count_1E`` is this rank's."""
        place = (microbatch.index, microbatch.application)
        if microbatch.recomputing:
            return self._seen_1E[place]
        if place == (0, 0):
            self._seen_1E.clear()
        whole_1E = sum_integers(self._group, count_1E)
        if microbatch.index:
            whole_1E = whole_1E + self._seen_1E[microbatch.index - 1, microbatch.application]
        self._seen_1E[place] = whole_1E
        return whole_1E


class AuxiliaryLosses:
    """The losses the configuration asks for; ``apply`` attaches and reports them."""

    def __init__(self, config: TransformerConfig, context: ModelContext) -> None:
        self.balancing, self.z_coefficient = config.balancing_losses, config.moe_z_loss_coeff
        self.topk, self.num_experts = config.moe_router_topk, config.num_moe_experts
        self.softmax = config.moe_router_score_function == "softmax"
        self.context = context
        self._balance = context.ops["router_balance"]
        self._global = _GlobalCounts(context)

    def _tokens(self, local: int) -> int:
        """Tokens of the whole micro-batch, of which this rank holds ``local``."""
        return local * (self.context.groups.tp.size if self.context.cuts_sequence else 1)

    def _local_loss(self, p_BE: torch.Tensor, count_BE: torch.Tensor, length: int) -> torch.Tensor:
        """This rank's part of the mean over sets of ``length`` tokens each."""
        if self.context.cuts_sequence:
            count_BE = sum_integers(self.context.groups.tp, count_BE)
        factor = self.num_experts / (self.topk * float(self._tokens(length)) ** 2 * p_BE.shape[0])
        return (p_BE * count_BE).sum() * factor

    def _global_loss(
        self, p_BE: torch.Tensor, count_BE: torch.Tensor, local: int, microbatch: Microbatch
    ) -> torch.Tensor:
        seen = float(local * self.context.groups.tp_dp.size * (microbatch.index + 1))
        factor = self.num_experts / (self.topk * self._tokens(local) * seen)
        return (p_BE * self._global.up_to(count_BE, microbatch)).sum() * factor

    def _sums(
        self, logits_TE: torch.Tensor, score_TE: torch.Tensor, batch: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """P and counts of each balancing loss, ``[B, E]`` with a row for each set of tokens it looks at."""
        sets = tuple(batch if kind == "seq_aux_loss" else 1 for kind, _ in self.balancing)
        p_BE, count_BE = self._balance(logits_TE if self.softmax else score_TE, self.topk, sets, self.softmax)
        return [(p_BE, count_BE)] if len(sets) == 1 else list(zip(p_BE.split(sets), count_BE.split(sets), strict=True))

    def _losses(
        self, logits_TE: torch.Tensor, score_TE: torch.Tensor, batch: int, microbatch: Microbatch
    ) -> list[tuple[str, float, torch.Tensor]]:
        """(name, coefficient, this rank's part before its coefficient); the parts add up over the ranks."""
        losses, local = [], score_TE.shape[0]
        sums = self._sums(logits_TE, score_TE, batch) if self.balancing else []
        for (kind, coefficient), (p_BE, count_BE) in zip(self.balancing, sums, strict=True):
            if kind == "global_aux_loss":
                loss = self._global_loss(p_BE, count_BE, local, microbatch)
            else:
                loss = self._local_loss(p_BE, count_BE, local // p_BE.shape[0])
            losses.append((AUXILIARY_NAMES[kind], coefficient, loss))
        if self.z_coefficient:
            z_T = torch.logsumexp(logits_TE, dim=-1)
            losses.append((Z_LOSS_NAME, self.z_coefficient, (z_T * z_T).sum() / self._tokens(z_T.shape[0])))
        return losses

    def apply(
        self,
        weight_Tk: torch.Tensor,
        scores: tuple[torch.Tensor, torch.Tensor],
        batch: int,
        layer: int,
        microbatch: Microbatch,
        report: StageReport,
    ) -> torch.Tensor:
        """``weight_Tk`` unchanged; backward also differentiates the losses, each with its coefficient and the weight
        that a mean over this micro-batch has. A block that is applied several times weighs and reports its mean.

        ``scores`` are fp32 logits and scores ``[T, E]``, tokens in (s, b) order with ``batch`` sequences.
        """
        for name, coefficient, loss in self._losses(*scores, batch, microbatch):
            uses = microbatch.applications
            report.add_layer_value(name, layer, loss.detach() if uses == 1 else loss.detach() / uses)
            weight_Tk = _AttachLoss.apply(weight_Tk, loss, microbatch.weight * (coefficient / uses))
        return weight_Tk
