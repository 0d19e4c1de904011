"""Which activations are not kept for the backward pass but computed a second time; the same bits either way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.fields import layout

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


@dataclass(frozen=True, kw_only=True)
class RecomputeFields:
    """Recomputation part of ``TransformerConfig``."""

    recompute_granularity: Literal["full", "selective"] | None = layout(None)
    """Compute again in the backward pass: whole layers (full), or the parts that --recompute-modules names; nothing
    when not given."""
    recompute_method: Literal["uniform", "block"] | None = layout(None)
    """With full: every layer, in pieces of --recompute-num-layers (uniform), or the first --recompute-num-layers of
    each chunk, one at a time (block)."""
    recompute_num_layers: int | None = layout(None)
    """With full: see --recompute-method."""
    recompute_modules: tuple[Module, ...] | None = layout(None)
    """With selective: attention without its projections (core_attn, the default), outputs of norms (layernorm), MLP
    layers (mlp), MoE layers (moe), the routed experts' activations (moe_act), shared experts (shared_experts)."""

    def recomputes(self, module: Module) -> bool:
        """Whether this part of a layer is computed again."""
        return self.recompute_granularity == "selective" and module in (self.recompute_modules or ("core_attn",))
