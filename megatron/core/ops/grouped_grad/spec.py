"""Contract of ``grouped_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.grouped_gemm.spec import GROUPS, ends_of
from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Empty experts, no rows at all, a main gradient with room between the experts."""
    draw = Samples(generator, dtype, device)
    out = []
    for counts, width_in, width_out in GROUPS:
        numel = width_in * width_out
        buffer = draw.normal(len(counts), numel + 1024, fp32=True)
        main_grad = buffer[:, :numel].unflatten(1, (width_out, width_in))
        rows = sum(counts)
        args = (main_grad, draw.normal(rows, width_out), draw.normal(rows, width_in), ends_of(counts, device))
        out.append(Case(name=f"{counts}-{width_in}-{width_out}", args=args, writes=(0,)))
    return out


SPEC = OpSpec(
    name="grouped_grad",
    promise="grouped_grad(main_grad_EYX fp32, dy_RY, x_RX, ends_E): main_grad[e] += dy_e^T x_e, in place, in fp32.",
    order="Rows of an expert in an order fixed by their number and the widths; experts without rows stay untouched.",
    cases=cases,
    tolerance=tolerances(2e-5, 2e-5, "sums of up to 31 fp32 products; the main gradient is fp32"),
)
