"""The definition of ``grouped_gemm``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def counts_of(ends_E: torch.Tensor, rows: int, experts: int) -> list[int]:
    """Rows of each expert, on the host, which waits for the device.

    Raises:
        ValueError: the ends do not fit ``rows`` rows of ``experts`` experts.
    """
    ends = ends_E.tolist()
    counts = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
    if sum(counts) != rows or len(counts) != experts or min(counts, default=0) < 0:
        raise ValueError(f"ends {ends} for {rows} rows and {experts} experts")
    return counts


def grouped_gemm(
    x_RX: torch.Tensor, weight_EYX: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """One fp32 product per expert that has rows. No autograd.

    Rows up to ``ends_E[e]`` (int32, ascending, on the device of the rows) from the end before on belong to expert e.
    ``transposed`` maps width Y back to X.

    Raises:
        ValueError: the ends do not fit the rows or the experts.
    """
    counts = counts_of(ends_E, x_RX.shape[0], weight_EYX.shape[0])
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
