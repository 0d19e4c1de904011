"""What each pattern symbol is built from; ``--spec`` names ``hybrid_stack_spec``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.config.recompute import Module
from megatron.core.config.transformer import TransformerConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import ATTENTION, DENSE, MAMBA, MOE
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.layer import MoELayer

Builder = Callable[[str, int, TransformerConfig, ModelContext], torch.nn.Module]
"""``build(name, layer, config, context)``: a module whose ``forward(x_SBH, microbatch, report)`` returns the layer's
contribution to the residual stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One kind of layer.

    ``slot`` is the attribute, and so the part of the parameter names, that holds the built module. ``pre_norm`` names
    a norm of its own in front of it; without one the module normalises its input itself. ``recompute`` is the name by
    which --recompute-modules may ask for the whole module.
    """

    slot: str
    build: Builder
    pre_norm: str | None = None
    recompute: Module | None = None


def _dense_mlp(name: str, layer: int, config: TransformerConfig, context: ModelContext) -> MLP:
    return MLP(name, config.ffn_hidden_size, config, context)


HybridStackSpec = Mapping[str, LayerSpec]

hybrid_stack_spec: HybridStackSpec = {
    MAMBA: LayerSpec(slot="mixer", build=MambaMixer),
    ATTENTION: LayerSpec(slot="self_attention", build=SelfAttention),
    DENSE: LayerSpec(slot="mlp", build=_dense_mlp, recompute="mlp"),
    MOE: LayerSpec(slot="mlp", build=MoELayer, pre_norm="pre_mlp_layernorm", recompute="moe"),
}
"""Layers of the hybrid models."""
