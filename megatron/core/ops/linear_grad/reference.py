"""The definition of ``linear_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def linear_grad(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
    """Add the weight gradient of ``y = x weight^T``: one fp32 product over all rows, then one addition."""
    with torch.no_grad():
        main_grad_YX.add_(widen(dy_RY).t() @ widen(x_RX))


VARIANT = Variant(
    name="reference",
    fn=linear_grad,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product of fixed shape and one addition.",
)
