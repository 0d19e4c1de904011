"""The definition of ``grouped_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, counts: tuple[int, ...]) -> None:
    """Add each expert's weight gradient: one fp32 product over its rows, then one addition.

    Raises:
        ValueError: ``counts`` does not fit the rows or the experts.
    """
    check(main_grad_EYX, dy_RY, x_RX, counts)
    with torch.no_grad():
        start = 0
        for main_grad_YX, count in zip(main_grad_EYX, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                main_grad_YX.add_(widen(dy_RY[rows]).t() @ widen(x_RX[rows]))
            start += count


def check(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, counts: tuple[int, ...]) -> None:
    """Refuse counts that do not fit.

    Raises:
        ValueError: see ``grouped_grad``.
    """
    rows, experts = {sum(counts), dy_RY.shape[0], x_RX.shape[0]}, main_grad_EYX.shape[0]
    if len(rows) > 1 or len(counts) != experts:
        raise ValueError(f"counts {counts} for {dy_RY.shape[0]} and {x_RX.shape[0]} rows and {experts} experts")


VARIANT = Variant(
    name="reference",
    fn=grouped_grad,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product per expert and one addition.",
)
