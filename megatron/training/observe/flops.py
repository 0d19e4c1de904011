"""Floating-point operations of a training sample, counted as Megatron counts them, so that throughputs compare."""

from __future__ import annotations

from megatron.core.config.transformer import TransformerConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import ATTENTION, DENSE, MAMBA, MOE


def flops_per_sample(config: TransformerConfig, layers: dict[str, int], vocab_size: int) -> float:
    """Forward and backward operations for one sequence.

    ``layers`` counts layers by pattern symbol; ``vocab_size`` is the padded one. The Mamba term uses an inner width
    of twice the hidden size whatever the heads say, as Megatron's formula does; attention counts pairs of
    positions as if causality left half of them.
    """
    hidden, tokens = config.hidden_size, config.seq_length
    head = 2 * tokens * hidden * vocab_size * (1 + config.prediction_depths)
    # Settings of a kind that the pattern lacks may be unknown.
    return 3.0 * (sum(_PER_LAYER[symbol](config) * count for symbol, count in layers.items() if count) + head)


def _mamba(config: TransformerConfig) -> float:
    hidden, tokens = config.hidden_size, config.seq_length
    inner, groups, state = 2 * hidden, config.mamba_num_groups, config.mamba_state_dim
    rows = 2 * inner + 2 * groups * state + config.mamba_num_heads
    return 2 * tokens * hidden * rows + 7 * tokens * inner * state + 2 * tokens * inner * hidden


def _attention(config: TransformerConfig) -> float:
    hidden, tokens = config.hidden_size, config.seq_length
    share = config.kv_channels * config.num_attention_heads / hidden
    grouped = config.key_value_groups / config.num_attention_heads
    return 4 * tokens * hidden * share * (hidden + hidden * grouped) + 2 * tokens**2 * hidden * share


def _gated(config: TransformerConfig) -> float:
    return 1.5 if config.swiglu else 1.0


def _dense(config: TransformerConfig) -> float:
    return 4 * config.seq_length * config.hidden_size * config.ffn_hidden_size * _gated(config)


def _experts(config: TransformerConfig) -> float:
    hidden, tokens, latent = config.hidden_size, config.seq_length, config.moe_latent_size or 0
    routed = 4 * tokens * (latent or hidden) * config.moe_ffn_hidden_size * config.moe_router_topk * _gated(config)
    shared = 4 * tokens * hidden * (config.moe_shared_expert_intermediate_size or 0) * _gated(config)
    return routed + 4 * tokens * hidden * latent + shared


_PER_LAYER = {MAMBA: _mamba, ATTENTION: _attention, DENSE: _dense, MOE: _experts}
