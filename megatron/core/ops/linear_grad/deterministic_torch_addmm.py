"""``linear_grad`` as one product that adds into the fp32 main gradient itself."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def add_product(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
    """``main_grad += dy^T x`` with fp32 accumulation and without an intermediate; nothing happens for no rows."""
    if not x_RX.shape[0] or not main_grad_YX.numel():
        return
    if x_RX.dtype == torch.float32:
        torch.addmm(main_grad_YX, dy_RY.t(), x_RX, out=main_grad_YX)
    else:
        torch.addmm(main_grad_YX, dy_RY.t(), x_RX, out_dtype=torch.float32, out=main_grad_YX)


def linear_grad(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
    """Same contract as the reference."""
    with torch.no_grad():
        add_product(main_grad_YX, dy_RY, x_RX)


VARIANT = Variant(
    name="deterministic_torch_addmm",
    fn=linear_grad,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product of fixed shape that starts from the main gradient; the workspace is pinned.",
)
