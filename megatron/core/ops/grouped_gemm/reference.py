"""The definition of ``grouped_gemm``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def grouped_gemm(
    x_RX: torch.Tensor, weight_EYX: torch.Tensor, counts: tuple[int, ...], *, transposed: bool = False
) -> torch.Tensor:
    """One fp32 product per expert that has rows. No autograd.

    ``counts[e]`` consecutive rows belong to expert e. ``transposed`` maps width Y back to X.

    Raises:
        ValueError: ``counts`` does not fit the rows or the experts.
    """
    if sum(counts) != x_RX.shape[0] or len(counts) != weight_EYX.shape[0]:
        raise ValueError(f"counts {counts} for {x_RX.shape[0]} rows and {weight_EYX.shape[0]} experts")
    with torch.no_grad():
        out_RY = x_RX.new_empty(x_RX.shape[0], weight_EYX.shape[2 if transposed else 1])
        start = 0
        for weight_YX, count in zip(weight_EYX, counts, strict=True):
            if count:
                weight = widen(weight_YX if transposed else weight_YX.t())
                out_RY[start : start + count] = widen(x_RX[start : start + count]) @ weight
            start += count
    return out_RY


VARIANT = Variant(
    name="reference",
    fn=grouped_gemm,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="One BLAS product per expert; its order depends on the number of rows.",
)
