"""Floating-point operations of a training sample, counted as Megatron counts them, so that throughputs compare."""

from __future__ import annotations

from megatron.core.config.transformer import TransformerConfig


def flops_per_sample(config: TransformerConfig, layers: dict[str, int], vocab_size: int) -> float:
    """Forward and backward operations for one sequence.

    ``layers`` counts layers by pattern symbol; ``vocab_size`` is the padded one. The Mamba term uses an inner width
    of twice the hidden size whatever the heads say, as Megatron's formula does; attention counts the whole score
    matrix.
    """
    hidden, tokens = config.hidden_size, config.seq_length
    inner, groups, state = 2 * hidden, config.mamba_num_groups, config.mamba_state_dim
    mamba = (
        2 * tokens * hidden * (2 * inner + 2 * groups * state + config.mamba_num_heads)
        + 7 * tokens * inner * state
        + 2 * tokens * inner * hidden
    )
    share = config.kv_channels * config.num_attention_heads / hidden
    grouped = config.key_value_groups / config.num_attention_heads
    attention = 4 * tokens * hidden * share * (hidden + hidden * grouped) + 2 * tokens**2 * hidden * share
    gated = 1.5 if config.swiglu else 1.0
    mlp = 4 * tokens * hidden * config.ffn_hidden_size * gated
    width = config.moe_latent_size or hidden
    routed = 4 * tokens * width * (config.moe_ffn_hidden_size or 0) * config.moe_router_topk * gated
    routed += 4 * tokens * hidden * (config.moe_latent_size or 0)
    shared = 4 * tokens * hidden * (config.moe_shared_expert_intermediate_size or 0) * gated
    head = 2 * tokens * hidden * vocab_size * (1 + config.prediction_depths)
    per_layer = {"M": mamba, "*": attention, "-": mlp, "E": routed + shared}
    return 3.0 * (sum(per_layer[symbol] * count for symbol, count in layers.items()) + head)
