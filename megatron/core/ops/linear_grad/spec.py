"""Contract of ``linear_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Odd sizes, one row, no rows, gradients that arrive transposed."""
    draw = Samples(generator, dtype, device)
    out = []
    for rows, width_out, width_in in ((33, 24, 40), (1, 7, 5), (0, 8, 16), (130, 65, 17)):
        args = (draw.normal(width_out, width_in, fp32=True), draw.normal(rows, width_out), draw.normal(rows, width_in))
        out.append(Case(name=f"R{rows}-Y{width_out}-X{width_in}", args=args, writes=(0,)))
    args = (draw.normal(8, 12, fp32=True), draw.normal(8, 21).t(), draw.normal(12, 21).t())
    out.append(Case(name="transposed", args=args, writes=(0,)))
    return out


SPEC = OpSpec(
    name="linear_grad",
    promise="linear_grad(main_grad_YX fp32, dy_RY, x_RX): main_grad += dy^T x, in place, in fp32.",
    order="Rows in an order fixed by the shapes.",
    cases=cases,
    tolerance=tolerances(2e-5, 2e-5, "sums of up to 130 fp32 products; the main gradient is fp32"),
)
