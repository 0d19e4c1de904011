"""MoELayer: router, exchange, experts, shared experts."""

from __future__ import annotations

import torch

from megatron.core.config.errors import Problem
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.moe.dispatcher import TokenDispatcher
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExperts


def moe_problems(config: TransformerConfig, tp: int, ep: int, etp: int, sequence_parallel: bool) -> list[Problem]:
    """Why MoE layers of this shape cannot run on this layout; empty when they can."""
    experts, problems = config.num_moe_experts, []
    if not experts:
        return [Problem("a pattern with E and no experts", "the number of experts", "--num-experts")]
    if experts % ep:
        problems.append(
            Problem(
                f"--num-experts {experts}, --expert-model-parallel-size {ep}",
                f"experts to be a multiple of {ep}",
                "either",
            )
        )
    if not 1 <= config.moe_router_topk <= experts:
        problems.append(
            Problem(f"--moe-router-topk {config.moe_router_topk}", f"1 to {experts} experts", "--moe-router-topk")
        )
    if config.moe_ffn_hidden_size % etp:
        problems.append(
            Problem(
                f"--moe-ffn-hidden-size {config.moe_ffn_hidden_size}, expert tensor parallel size {etp}",
                f"an inner width that is a multiple of {etp}",
                "--moe-ffn-hidden-size or --expert-tensor-parallel-size",
            )
        )
    if tp > 1 and not sequence_parallel:
        problems.append(
            Problem(
                f"MoE layers with --tensor-model-parallel-size {tp} without --sequence-parallel",
                "sequence parallelism, so that each rank routes its own tokens",
                "add --sequence-parallel",
            )
        )
    if config.add_bias_linear and etp > 1:
        problems.append(
            Problem(
                f"MoE layers with linear biases and an expert tensor parallel size of {etp}",
                "an expert tensor parallel size of 1: a bias would be added by every rank",
                "--expert-tensor-parallel-size 1 or --disable-bias-linear",
            )
        )
    if config.add_bias_linear and config.moe_shared_expert_intermediate_size:
        problems.append(
            Problem("shared experts with linear biases", "no biases: shared experts have none", "--disable-bias-linear")
        )
    return problems


class MoELayer(torch.nn.Module):
    """Routed experts plus shared experts over a normalised input in the residual stream's form."""

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
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
