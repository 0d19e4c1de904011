"""Self-attention settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.fields import trajectory


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Attention part of ``TransformerConfig``."""

    num_attention_heads: int | None = trajectory(None)
    """Query heads of an attention layer; the tensor-parallel size must divide it."""
    group_query_attention: bool = trajectory(False)
    """Share keys and values between groups of query heads; without it --num-query-groups has no effect."""
    num_query_groups: int = trajectory(1)
    """Key/value groups when --group-query-attention is on; a multiple or a divisor of the tensor-parallel size."""
    kv_channels: int | None = trajectory(None)
    """Width of one attention head; default: hidden size / heads."""
    qk_layernorm: bool = trajectory(False)
    """Normalise every head's query and key before their positions are rotated in."""
    apply_wd_to_qk_layernorm: bool = trajectory(False)
    """Let the weights of these norms decay."""
    attention_dropout: float = trajectory(0.1)
    """Dropout probability on attention weights."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = trajectory("learned_absolute")
    """Learned table added to the embeddings, rotary embedding of queries and keys, or no positions."""
    max_position_embeddings: int | None = trajectory(None)
    """Longest sequence the position table holds; at least the sequence length."""
    rotary_base: int = trajectory(10000)
    """Base of the rotary frequencies."""
    rotary_percent: float = trajectory(1.0)
    """Leading share of each head's width that is rotated."""

    @property
    def key_value_groups(self) -> int:
        """Key/value groups in effect: every head has its own unless grouped-query attention is on."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads
