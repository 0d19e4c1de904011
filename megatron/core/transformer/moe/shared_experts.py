"""Shared experts: one MLP that every token passes, cut over the tensor-parallel ranks."""

from __future__ import annotations

from megatron.core.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.mlp import MLP


class SharedExperts(MLP):
    """MLP of inner width ``moe_shared_expert_intermediate_size`` over the layer's normalised input; no bias."""

    def __init__(self, name: str, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__(name, config.moe_shared_expert_intermediate_size, config, context, normalize=False, bias=False)
