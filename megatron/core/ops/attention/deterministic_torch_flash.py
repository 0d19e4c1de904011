"""``attention`` by torch's flash kernels, with the backward that adds a query's gradients in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.registry import Guarantee, Variant


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Torch's switch on for a while: the flash backward reads it when it is launched."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class _FlashAttention(Node):
    """Tensors are [B, N, S, D] views; grouped keys and values are read without being repeated."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out, log_sum, cum_q, cum_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, log_sum, seed, offset)
        ctx.rest = (cum_q, cum_k, max_q, max_k, scale)
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        q, k, v, out, log_sum, seed, offset = ctx.saved_tensors
        cum_q, cum_k, max_q, max_k, scale = ctx.rest
        with deterministic_algorithms():
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, log_sum, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
            )
        return dq, dk, dv, None


def last_dim_adjacent(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself if elements of its last dim are adjacent, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Same contract as the reference, for bf16 and head widths up to 256 that are multiples of 8."""
    if not q_SBND.numel():
        return q_SBND + 0.0 * (k_SBGD.sum() + v_SBGD.sum())
    q, k, v = (last_dim_adjacent(x).permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    return _FlashAttention.apply(q, k, v, scale).permute(2, 0, 1, 3).contiguous()


VARIANT = Variant(
    name="deterministic_torch_flash",
    fn=attention,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    dtypes=frozenset({torch.bfloat16}),
    why="One writer per output; the backward keeps partial query gradients apart and adds them in order.",
    head_widths=range(8, 257, 8),
)
