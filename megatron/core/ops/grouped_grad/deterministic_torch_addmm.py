"""``grouped_grad`` as one product per expert that adds into the fp32 main gradient itself."""

from __future__ import annotations

import torch

from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.linear_grad.deterministic_torch_addmm import add_product
from megatron.core.ops.registry import Guarantee, Variant


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Same contract as the reference."""
    counts = counts_of(ends_E, x_RX.shape[0], main_grad_EYX.shape[0])
    with torch.no_grad():
        for main_grad_YX, dy, x in zip(main_grad_EYX, dy_RY.split(counts), x_RX.split(counts), strict=True):
            add_product(main_grad_YX, dy, x)


VARIANT = Variant(
    name="deterministic_torch_addmm",
    fn=grouped_grad,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product per expert that starts from the main gradient; the workspace is pinned.",
    sources=("megatron.core.ops.linear_grad.deterministic_torch_addmm", "megatron.core.ops.grouped_gemm.reference"),
)
