"""MoELayer: router, exchange, experts, shared experts."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.moe.dispatcher import TokenDispatcher
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExperts


class MoELayer(torch.nn.Module):
    """Routed experts plus shared experts over a normalised input in the residual stream's form.

    Raises:
        ValueError: activations are not cut along the sequence though there are several tensor-parallel ranks (each
            would route every token), or the expert-parallel size does not divide the experts.
    """

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        tp, ep = context.groups.tp, context.groups.ep
        if tp.size > 1 and not context.sequence_parallel:
            raise ValueError(f"{name}: experts over {tp.size} tensor-parallel ranks need sequence parallelism")
        if config.num_moe_experts % ep.size:
            raise ValueError(f"{name}: {config.num_moe_experts} experts over {ep.size} expert-parallel ranks")
        self.router = TopKRouter(f"{name}.router", layer, config, context)
        self.experts = GroupedMLP(f"{name}.experts", config, context)
        self.shared_experts = (
            SharedExperts(f"{name}.shared_experts", config, context)
            if config.moe_shared_expert_intermediate_size
            else None
        )
        self._dispatcher = TokenDispatcher(config.num_moe_experts, context)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The layer's contribution to the residual stream."""
        routing = self.router(x_SBH, microbatch, report)
        plan = self._dispatcher.plan(routing)
        rows_RH, weight_R = self._dispatcher.dispatch(x_SBH.flatten(0, 1), routing, plan)
        out_TH = self._dispatcher.combine(self.experts(rows_RH, weight_R, plan.counts), plan)
        out_SBH = out_TH.view(x_SBH.shape)
        if self.shared_experts is not None:
            out_SBH = out_SBH + self.shared_experts(x_SBH, microbatch, report)
        return out_SBH
