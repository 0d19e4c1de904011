"""Contract of ``grouped_gemm``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import Samples, tolerances

GROUPS = (((3, 0, 5, 1), 16, 24), ((0, 0), 8, 8), ((17,), 33, 9), ((0, 31, 0, 2, 0), 32, 40))
"""Rows per expert, width in, width out."""


def expert_weight(draw: Samples, experts: int, rows: int, columns: int, *, strided: bool) -> torch.Tensor:
    """A stack ``[E, rows, columns]``; ``strided``: with room between the experts, as in a flat buffer."""
    step = rows * columns + (1024 if strided else 0)
    return draw.normal(experts, step, scale=0.2)[:, : rows * columns].unflatten(1, (rows, columns))


def ends_of(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where each expert's rows end."""
    return torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Empty experts first, last and between, no rows at all, odd widths, padded stacks, both directions."""
    draw = Samples(generator, dtype, device)
    out = []
    for counts, width_in, width_out in GROUPS:
        for transposed in (False, True):
            weight = expert_weight(draw, len(counts), width_out, width_in, strided=len(counts) > 1)
            x = draw.normal(sum(counts), width_out if transposed else width_in)
            name = f"{counts}-{width_in}-{width_out}{'-transposed' * transposed}"
            out.append(Case(name=name, args=(x, weight, ends_of(counts, device)), kwargs={"transposed": transposed}))
    return out


SPEC = OpSpec(
    name="grouped_gemm",
    promise="grouped_gemm(x_RX, weight_EYX, ends_E, transposed=False) -> x times each group's weight^T (or weight).",
    order="A group's products in an order fixed by its number of rows and the widths; groups do not mix.",
    cases=cases,
    tolerance=tolerances(2e-5, 1e-2, "dot products of up to 40 terms in fp32"),
)
