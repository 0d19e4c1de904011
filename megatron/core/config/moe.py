"""Mixture-of-experts settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.fields import operational, trajectory

AUXILIARY_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Name of the logged loss, by --moe-router-load-balancing-type."""
Z_LOSS_NAME = "z_loss"


@dataclass(frozen=True, kw_only=True)
class MoEFields:
    """MoE part of ``TransformerConfig``."""

    num_moe_experts: int | None = trajectory(None, flags=("--num-experts",))
    """Routed experts per MoE layer; the expert-parallel size divides it."""
    moe_ffn_hidden_size: int | None = trajectory(None)
    """Inner width of a routed expert; default: the dense layers' inner width."""
    moe_router_topk: int = trajectory(2)
    """Experts each token is sent to. Equal scores: the lowest expert id wins."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = trajectory("softmax")
    """Turns router logits into scores, in fp32."""
    moe_router_pre_softmax: bool = trajectory(False)
    """With softmax scores: normalise over all experts before the top-k instead of over the chosen ones after it."""
    moe_router_topk_scaling_factor: float | None = trajectory(None)
    """Factor on the final routing weights."""
    moe_router_enable_expert_bias: bool = trajectory(False)
    """Add a per-expert bias to the scores for choosing experts only; updated each step from exact token counts."""
    moe_router_bias_update_rate: float = trajectory(1e-3)
    """Step of the expert bias towards balance."""
    moe_router_num_groups: int | None = trajectory(None)
    """Consecutive groups of experts; a token chooses inside its --moe-router-group-topk best ones."""
    moe_router_group_topk: int | None = trajectory(None)
    """Groups a token may choose experts from; a group is worth the sum of its topk / group-topk best scores."""
    moe_router_load_balancing_type: tuple[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"], ...] = (
        trajectory(("aux_loss",))
    )
    """Load-balancing losses: over a micro-batch, over each sequence, over the global batch so far, or none."""
    moe_aux_loss_coeff: tuple[float, ...] = trajectory((0.0,))
    """Weight of each load-balancing loss."""
    moe_z_loss_coeff: float | None = trajectory(None)
    """Weight of the mean squared logsumexp of the router's logits; none when not given."""
    moe_router_force_load_balancing: bool = trajectory(False)
    """For speed measurements: send tokens to the experts in turn, whatever their scores."""
    moe_expert_capacity_factor: float | None = trajectory(None)
    """Tokens an expert takes from one rank's part of a micro-batch, as a multiple of the even share; further ones are
    dropped. None or a negative number: no limit."""
    moe_pad_expert_input_to_capacity: bool = trajectory(False)
    """Fill every expert's input up to its capacity with rows of zeros."""
    moe_token_drop_policy: Literal["probs", "position"] = trajectory("probs")
    """Which tokens an expert over its capacity keeps: those with the largest weights, or the first ones."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = trajectory(None)
    """Type the router logits are computed in; default: the activations' type."""
    moe_input_jitter_eps: float | None = trajectory(None)
    """Multiply the router's input by uniform noise from [1 - eps, 1 + eps]."""
    moe_shared_expert_intermediate_size: int | None = trajectory(None)
    """Total inner width of the shared experts, which every token passes; none when not given."""
    moe_shared_expert_gate: bool = trajectory(False)
    """Multiply the shared experts' output by a learned sigmoid gate of each token."""
    moe_latent_size: int | None = trajectory(None)
    """Width at which the routed experts run, between two projections; default: the residual stream's."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = operational("allgather")
    """How tokens reach their experts: each where it is wanted, or all of them on every rank of the expert group, which
    picks its own. Outputs come back by one all-to-all; the bits are the same."""
    moe_grouped_gemm: bool = operational(False)
    """Run all local experts as one grouped product; always on here, the flag is accepted."""

    @property
    def balancing_losses(self) -> tuple[tuple[str, float], ...]:
        """(type, coefficient) of every load-balancing loss in effect."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return tuple((kind, coefficient) for kind, coefficient in pairs if kind != "none" and coefficient)

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """Names under which the auxiliary losses in effect are reported."""
        names = tuple(AUXILIARY_NAMES[kind] for kind, _ in self.balancing_losses)
        return (*names, Z_LOSS_NAME) if self.moe_z_loss_coeff else names
