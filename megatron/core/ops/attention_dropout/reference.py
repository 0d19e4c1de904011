"""The definition of ``attention_dropout``."""

from __future__ import annotations

import torch

from megatron.core.ops.attention.reference import attention_weights, weighted_values
from megatron.core.ops.registry import Guarantee, Variant


def attention_dropout(
    q_SBND: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    scale: float,
    keep_BNSS: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Causal attention whose weights are kept where ``keep_BNSS`` is True and then scaled by 1 / (1 - p)."""
    weights = attention_weights(q_SBND, k_SBGD, scale)
    keep = keep_BNSS.unflatten(1, weights.shape[1:3])
    return weighted_values(weights * keep * (1.0 / (1.0 - p)), v_SBGD)


VARIANT = Variant(
    name="reference",
    fn=attention_dropout,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes and torch's softmax; no atomics. The mask is an argument.",
    sources=("megatron.core.ops.attention.reference",),
)
