"""``attention_dropout`` by blocks of queries."""

from __future__ import annotations

import torch

from megatron.core.ops.attention.deterministic import blocked_attention
from megatron.core.ops.registry import Guarantee, Variant


def attention_dropout(
    q_SBND: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    scale: float,
    keep_BNSS: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """See the reference. Gradients of keys and values add over blocks of queries, first to last, in fp32."""
    return blocked_attention(q_SBND, k_SBGD, v_SBGD, scale, (keep_BNSS, p))


VARIANT = Variant(
    name="deterministic",
    fn=attention_dropout,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes and torch's softmax, blocks in order; no atomics. The mask is an argument.",
    sources=("megatron.core.ops.attention.deterministic", "megatron.core.ops.attention.reference"),
)
