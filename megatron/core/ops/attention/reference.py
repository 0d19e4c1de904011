"""The definition of ``attention``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def attention_weights(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, scale: float, first: int = 0) -> torch.Tensor:
    """Causal softmax weights ``[B, G, N/G, queries, keys]`` in fp32; ``first`` is the position of the first query."""
    q = widen(q_SBND).permute(1, 2, 0, 3).unflatten(1, (k_SBGD.shape[2], -1))
    k = widen(k_SBGD).permute(1, 2, 3, 0).unsqueeze(2)
    scores = torch.matmul(q, k) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)


def weighted_values(weights: torch.Tensor, v_SBGD: torch.Tensor) -> torch.Tensor:
    """``weights`` ``[B, G, N/G, S, S]`` times values, as contiguous ``[S, B, N, D]`` in the type of ``v_SBGD``."""
    v = widen(v_SBGD).permute(1, 2, 0, 3).unsqueeze(2)
    out_BNSD = torch.matmul(weights, v).flatten(1, 2)
    return out_BNSD.permute(2, 0, 1, 3).to(v_SBGD.dtype).contiguous()


def attention(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in fp32 with the whole S x S matrix in memory; in the type of the inputs."""
    return weighted_values(attention_weights(q_SBND, k_SBGD, scale), v_SBGD)


VARIANT = Variant(
    name="reference",
    fn=attention,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes and torch's softmax; no atomics.",
)
