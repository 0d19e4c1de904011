"""Mixture-of-experts settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.fields import operational, trajectory


@dataclass(frozen=True, kw_only=True)
class MoEFields:
    """MoE part of ``TransformerConfig``."""

    num_moe_experts: int | None = trajectory(None, flags=("--num-experts",))
    """Routed experts per MoE layer; the expert-parallel size divides it."""
    moe_ffn_hidden_size: int | None = trajectory(None)
    """Inner width of a routed expert; default: the dense layers' inner width."""
    moe_router_topk: int = trajectory(2)
    """Experts each token is sent to. Equal scores: the lowest expert id wins."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = trajectory("softmax")
    """Turns router logits into scores, in fp32."""
    moe_router_pre_softmax: bool = trajectory(False)
    """With softmax scores: normalise over all experts before the top-k instead of over the chosen ones after it."""
    moe_router_topk_scaling_factor: float | None = trajectory(None)
    """Factor on the final routing weights."""
    moe_router_enable_expert_bias: bool = trajectory(False)
    """Add a per-expert bias to the scores for choosing experts only; updated each step from exact token counts."""
    moe_router_bias_update_rate: float = trajectory(1e-3)
    """Step of the expert bias towards balance."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = trajectory("aux_loss")
    """Load-balancing loss: over a micro-batch, over each sequence, or none."""
    moe_aux_loss_coeff: float = trajectory(0.0)
    """Weight of the load-balancing loss."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = trajectory(None)
    """Type the router logits are computed in; default: the activations' type."""
    moe_input_jitter_eps: float | None = trajectory(None)
    """Multiply the router's input by uniform noise from [1 - eps, 1 + eps]."""
    moe_shared_expert_intermediate_size: int | None = trajectory(None)
    """Total inner width of the shared experts, which every token passes; none when not given."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = operational("allgather")
    """How tokens reach their experts. Both names give the same bits here: one all-to-all of rows in logical order."""
    moe_grouped_gemm: bool = operational(False)
    """Run all local experts as one grouped product; always on here, the flag is accepted."""
