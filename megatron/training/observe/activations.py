"""Estimate of the activations that a rank keeps between forward and backward.

Counted is what modules and the GPU variants of ops save for their backward, without recomputation: inputs of products,
of norms and of ops. The CPU variants of attention and of the scan keep more. Temporaries within one op are not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.transformer import TransformerConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import ATTENTION, DENSE, MAMBA, MOE
from megatron.core.pipeline_parallel.plan import in_flight_limit

_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """What the bytes of one micro-batch depend on besides the model: tokens, sizes of the axes, whether the residual
    stream is cut along the sequence, and the bytes of an activation."""

    tokens: int
    tp: int
    etp: int
    cuts_sequence: bool
    activation_bytes: int

    @property
    def own_tokens(self) -> int:
        """Tokens between tensor-parallel regions."""
        return self.tokens // self.tp if self.cuts_sequence else self.tokens


def layer_bytes(symbol: str, model: TransformerConfig, shape: ActivationShape) -> int:
    """Bytes that one layer keeps for one micro-batch."""
    inner = {MAMBA: _mamba, ATTENTION: _attention, DENSE: _dense, MOE: _experts}[symbol](model, shape)
    dropout = shape.own_tokens * model.hidden_size if model.hidden_dropout else 0
    return _norm(model, shape) + inner + dropout


def head_bytes(model: TransformerConfig, padded_vocab_size: int, shape: ActivationShape) -> int:
    """Bytes of final norm, output layer and loss; their gradient, as large as the logits, is counted too, for it is
    there while everything else still is."""
    return _norm(model, shape) + 2 * _logits(padded_vocab_size, shape)


def prediction_bytes(symbols: str, model: TransformerConfig, padded_vocab_size: int, shape: ActivationShape) -> int:
    """Bytes of one depth of multi-token prediction: the embeddings, both normalised inputs side by side, its layers,
    its last norm and its logits. Its other input is kept by the head before it."""
    inputs = shape.own_tokens * (3 * model.hidden_size * shape.activation_bytes + 2 * _FP32)
    layers = sum(layer_bytes(symbol, model, shape) for symbol in symbols)
    return inputs + layers + _norm(model, shape) + _logits(padded_vocab_size, shape)


def in_flight_chunks(rank: int, pp: int, vpp: int, num_microbatches: int) -> int:
    """Forward passes of a pipeline rank's chunks that wait for their backward at the fullest moment."""
    return min(in_flight_limit(rank, pp, vpp), vpp * num_microbatches)


def _logits(padded_vocab_size: int, shape: ActivationShape) -> int:
    return shape.activation_bytes * shape.tokens * padded_vocab_size // shape.tp


def _norm(model: TransformerConfig, shape: ActivationShape) -> int:
    """Residual stream in front of a norm, the norm's result, and a scale per token."""
    residual = _FP32 if model.fp32_residual_connection else shape.activation_bytes
    return shape.own_tokens * (model.hidden_size * (residual + shape.activation_bytes) + _FP32)


def _mamba(model: TransformerConfig, shape: ActivationShape) -> int:
    """Rows of the input projection, the convolution's result, the scan's (kept before and behind the gated norm), a
    step and a decay per head."""
    inner = model.mamba_num_heads * model.mamba_head_dim
    channels = inner + 2 * model.mamba_num_groups * model.mamba_state_dim
    rows = inner + channels + model.mamba_num_heads
    scales = _FP32 * (model.mamba_num_groups + 2 * model.mamba_num_heads)
    return shape.tokens * (shape.activation_bytes * (rows + channels + 2 * inner) + scales) // shape.tp


def _attention(model: TransformerConfig, shape: ActivationShape) -> int:
    """Queries, keys, values, the result, and one log-sum per query."""
    heads, groups = model.num_attention_heads, model.key_value_groups
    local = 2 * heads // shape.tp + 2 * max(1, groups // shape.tp)
    return shape.tokens * (shape.activation_bytes * local * model.kv_channels + _FP32 * heads // shape.tp)


def _mlp(model: TransformerConfig, shape: ActivationShape, rows: int, ffn_size: int, cut: int) -> int:
    """Input and result of an activation."""
    width = (3 if model.activation == "swiglu" else 2) * ffn_size // cut
    return rows * width * shape.activation_bytes


def _dense(model: TransformerConfig, shape: ActivationShape) -> int:
    return _mlp(model, shape, shape.tokens, model.ffn_hidden_size, shape.tp)


def _experts(model: TransformerConfig, shape: ActivationShape) -> int:
    """Router input in its type, logits, scores and weights; rows of the experts when every expert gets its share;
    shared experts."""
    own, experts = shape.own_tokens, model.num_moe_experts
    rows = own * model.moe_router_topk * shape.etp
    router_input = {"fp32": 4, "fp64": 8}.get(model.moe_router_dtype or "", 0) * model.hidden_size
    kept = own * (router_input + 3 * _FP32 * experts)
    kept += rows * (model.hidden_size * shape.activation_bytes + _FP32)
    kept += _mlp(model, shape, rows, model.moe_ffn_hidden_size, shape.etp)
    if model.moe_shared_expert_intermediate_size:
        kept += _mlp(model, shape, shape.tokens, model.moe_shared_expert_intermediate_size, shape.tp)
    return kept
