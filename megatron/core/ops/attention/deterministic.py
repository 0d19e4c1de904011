"""``attention`` by blocks of queries: keeps only its inputs and computes each block again in the backward.

A sequence of one block keeps its weights instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.attention.reference import attention_weights, weighted_values
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.rerun import rerun

BLOCK = 512


_Tensors = Sequence[torch.Tensor]
_Keep = tuple[torch.Tensor, float] | None


def _block(qkv: _Tensors, scale: float, start: int, keep: _Keep) -> torch.Tensor:
    """Outputs of the queries from ``start`` on, in their type; keys and values end where the queries end."""
    q_SBND, k_SBGD, v_SBGD = qkv
    weights = attention_weights(q_SBND, k_SBGD, scale, first=start)
    if keep is not None:
        keep_BNSS, p = keep
        stop = k_SBGD.shape[0]
        weights = weights * keep_BNSS[:, :, start:stop, :stop].unflatten(1, weights.shape[1:3]) * (1.0 / (1.0 - p))
    return weighted_values(weights, v_SBGD)


class _BlockedAttention(Node):
    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGD, scale, keep):
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD)
        ctx.scale, ctx.keep = scale, keep
        out_SBND = torch.empty_like(q_SBND, memory_format=torch.contiguous_format)
        for start in range(0, q_SBND.shape[0], BLOCK):
            stop = start + BLOCK
            out_SBND[start:stop] = _block((q_SBND[start:stop], k_SBGD[:stop], v_SBGD[:stop]), scale, start, keep)
        return out_SBND

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_SBND):
        q_SBND, k_SBGD, v_SBGD = ctx.saved_tensors
        dq_SBND = torch.empty_like(q_SBND, memory_format=torch.contiguous_format)
        dk_SBGD, dv_SBGD = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k_SBGD, v_SBGD))
        for start in range(0, q_SBND.shape[0], BLOCK):
            stop = start + BLOCK
            parts = (q_SBND[start:stop], k_SBGD[:stop], v_SBGD[:stop])
            # fp32 leaves, so that the blocks' gradients of keys and values add up before they are rounded.
            leaves = [t.detach().float().requires_grad_() for t in parts]
            with rerun() as again:
                with torch.enable_grad():
                    out = _block(leaves, ctx.scale, start, ctx.keep)
                again.in_forward = False
                dq, dk, dv = torch.autograd.grad(out, leaves, dout_SBND[start:stop].float())
            dq_SBND[start:stop] = dq
            dk_SBGD[:stop].add_(dk)
            dv_SBGD[:stop].add_(dv)
        return dq_SBND, dk_SBGD.to(k_SBGD.dtype), dv_SBGD.to(v_SBGD.dtype), None, None


def blocked_attention(
    q_SBND: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    scale: float,
    keep: _Keep,
) -> torch.Tensor:
    """Causal attention by blocks of ``BLOCK`` queries, in one piece if there are no more; ``keep`` is the dropout mask
    [B, N, S, S] and p."""
    if q_SBND.shape[0] <= BLOCK:
        return _block((q_SBND, k_SBGD, v_SBGD), scale, 0, keep)
    return _BlockedAttention.apply(q_SBND, k_SBGD, v_SBGD, scale, keep)


def attention(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """See the reference. Gradients of keys and values add over blocks of queries, first to last, in fp32."""
    return blocked_attention(q_SBND, k_SBGD, v_SBGD, scale, None)


VARIANT = Variant(
    name="deterministic",
    fn=attention,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes and torch's softmax, blocks in order; no atomics.",
    sources=("megatron.core.ops.attention.reference",),
)
