"""``linear_grad`` as one product that accumulates into the main gradient."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def linear_grad(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
    """See the reference; the product adds into the main gradient inside BLAS, without a copy of the weight's size."""
    with torch.no_grad():
        main_grad_YX.addmm_(dy_RY.float().t(), x_RX.float())


VARIANT = Variant(
    name="deterministic",
    fn=linear_grad,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One fp32 BLAS product with accumulation, of fixed shape.",
)
