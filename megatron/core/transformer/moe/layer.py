"""MoELayer: router, exchange, experts, shared experts."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.param_spec import Initial
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import linear
from megatron.core.tensor_parallel.parameter import create_parameter, replicated_spec
from megatron.core.tensor_parallel.recompute import run_again
from megatron.core.transformer.moe.dispatcher import TokenDispatcher
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExperts


class LatentProjection(torch.nn.Module):
    """``x W^T`` into or out of the routed experts' width; ``weight`` is held whole by every rank."""

    def __init__(self, name: str, shape: tuple[int, int], std: float, context: ModelContext) -> None:
        super().__init__()
        self._context = context
        normal = Initial(kind="normal", a=std)
        self.weight = create_parameter(replicated_spec(f"{name}.weight", shape, normal, context), context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return linear(x, self.weight, self._context)


class MoELayer(torch.nn.Module):
    """Routed experts plus shared experts over a normalised input in the residual stream's form.

    With ``moe_latent_size`` the routed experts run at that width, between two projections; router and shared experts
    read the whole width.

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
        latent, hidden = config.moe_latent_size, config.hidden_size
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:
            std = config.init_method_std
            self.fc1_latent_proj = LatentProjection(f"{name}.fc1_latent_proj", (latent, hidden), std, context)
            std = config.output_init_std
            self.fc2_latent_proj = LatentProjection(f"{name}.fc2_latent_proj", (hidden, latent), std, context)
        self.experts = GroupedMLP(f"{name}.experts", config, context)
        self.shared_experts = (
            SharedExperts(f"{name}.shared_experts", config, context)
            if config.moe_shared_expert_intermediate_size
            else None
        )
        self._recomputes_shared = config.recomputes("shared_experts")
        self._dispatcher = TokenDispatcher(config, context)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The layer's contribution to the residual stream."""
        routing = self.router(x_SBH, microbatch, report)
        started = self._dispatcher.start_plan(routing)
        # Before the host waits for the sizes of the exchange, so that the device has something to do.
        shared_SBH = self._shared(x_SBH, microbatch, report)
        plan = started()
        x_TH = x_SBH.flatten(0, 1)
        if self.fc1_latent_proj is not None:
            x_TH = self.fc1_latent_proj(x_TH)
        rows_RH, weight_R = self._dispatcher.dispatch(x_TH, routing, plan)
        out_TH = self._dispatcher.combine(self.experts(rows_RH, weight_R, plan.ends_E), plan)
        if self.fc2_latent_proj is not None:
            out_TH = self.fc2_latent_proj(out_TH)
        out_SBH = out_TH.view(x_SBH.shape)
        return out_SBH if shared_SBH is None else out_SBH + shared_SBH

    def _shared(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor | None:
        if self.shared_experts is None:
            return None
        if self._recomputes_shared:
            return run_again(self.shared_experts, x_SBH, microbatch, report)
        return self.shared_experts(x_SBH, microbatch, report)
