"""``grouped_grad`` as one product per expert that adds into the fp32 main gradient itself."""

from __future__ import annotations

import torch

from megatron.core.ops.linear_grad.deterministic_torch_addmm import add_product
from megatron.core.ops.registry import Guarantee, Variant


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, counts: tuple[int, ...]) -> None:
    """Same contract as the reference.

    Raises:
        ValueError: ``counts`` does not fit the rows or the experts.
    """
    if not sum(counts) == x_RX.shape[0] == dy_RY.shape[0] or len(counts) != main_grad_EYX.shape[0]:
        raise ValueError(f"counts {counts} for {x_RX.shape[0]} rows and {main_grad_EYX.shape[0]} experts")
    with torch.no_grad():
        for main_grad_YX, dy, x in zip(main_grad_EYX, dy_RY.split(counts), x_RX.split(counts), strict=True):
            add_product(main_grad_YX, dy, x)


VARIANT = Variant(
    name="deterministic_torch_addmm",
    fn=grouped_grad,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product per expert that starts from the main gradient; the workspace is pinned.",
    sources=("megatron.core.ops.linear_grad.deterministic_torch_addmm",),
)
