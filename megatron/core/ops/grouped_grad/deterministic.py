"""``grouped_grad`` as one accumulating product per expert."""

from __future__ import annotations

import torch

from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.registry import Guarantee, Variant


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """See the reference; products add into the main gradient inside BLAS, without a copy of a weight's size."""
    counts = counts_of(ends_E, x_RX.shape[0], main_grad_EYX.shape[0])
    with torch.no_grad():
        start = 0
        for main_grad_YX, count in zip(main_grad_EYX, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                main_grad_YX.addmm_(dy_RY[rows].float().t(), x_RX[rows].float())
            start += count


VARIANT = Variant(
    name="deterministic",
    fn=grouped_grad,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One fp32 BLAS product with accumulation per expert.",
    sources=("megatron.core.ops.grouped_gemm.reference",),
)
