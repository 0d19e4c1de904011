"""The definition of ``grouped_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Add each expert's weight gradient: one fp32 product over its rows, then one addition.

    ``ends_E`` (int32, ascending, on the device of the rows): where each expert's rows end. Reading it makes the host
    wait for the device.

    Raises:
        ValueError: it does not fit the rows or the experts.
    """
    counts = counts_of(ends_E, x_RX.shape[0], main_grad_EYX.shape[0])
    with torch.no_grad():
        start = 0
        for main_grad_YX, count in zip(main_grad_EYX, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                main_grad_YX.add_(widen(dy_RY[rows]).t() @ widen(x_RX[rows]))
            start += count


VARIANT = Variant(
    name="reference",
    fn=grouped_grad,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product per expert and one addition.",
    sources=("megatron.core.ops.grouped_gemm.reference",),
)
