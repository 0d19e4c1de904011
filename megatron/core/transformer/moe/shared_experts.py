"""Shared experts: one MLP that every token passes, cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.param_spec import Initial
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import linear
from megatron.core.tensor_parallel.parameter import create_parameter, replicated_spec
from megatron.core.transformer.mlp import MLP


class SharedExperts(MLP):
    """MLP of inner width ``moe_shared_expert_intermediate_size`` over the layer's normalised input; no bias.

    With ``moe_shared_expert_gate`` each token's output is multiplied by sigmoid(``gate_weight`` x), in fp32.
    """

    def __init__(self, name: str, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__(name, config.moe_shared_expert_intermediate_size, config, context, normalize=False, bias=False)
        self._context = context
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            normal = Initial(kind="normal", a=config.init_method_std)
            spec = replicated_spec(f"{name}.gate_weight", (1, config.hidden_size), normal, context)
            self.gate_weight = create_parameter(spec, context)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """As ``MLP.forward``."""
        if self.gate_weight is None:
            return super().forward(x_SBH, microbatch, report)
        # For autograd outside of here the input is used once: the gradients of its two uses here are added first, as
        # they are under recomputation.
        x_SBH = x_SBH.view_as(x_SBH)
        out_SBH = super().forward(x_SBH, microbatch, report)
        gate_SB1 = torch.sigmoid(linear(x_SBH, self.gate_weight, self._context).float())
        return (out_SBH.float() * gate_SB1).to(out_SBH.dtype)
