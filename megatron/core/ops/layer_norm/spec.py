"""Contract of ``layer_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Odd widths, no rows, one column, large magnitudes, constant rows."""
    draw = Samples(generator, dtype, device)
    out = []
    for shape, scale in (((5, 3, 33), 1.0), ((0, 2, 8), 1.0), ((2, 1, 1), 1.0), ((7, 1030), 1e15), ((4, 64), 1e-18)):
        weight, bias = draw.normal(shape[-1], shift=1.0, fp32=True), draw.normal(shape[-1], fp32=True)
        args = (draw.normal(*shape, scale=scale), weight, bias, 1e-5)
        out.append(Case(name=f"{shape}-{scale:g}", args=args, grads=(0, 1, 2)))
    rows = draw.normal(6, 48)
    rows[2] = 0.5
    args = (rows, draw.normal(48, fp32=True), draw.normal(48, fp32=True), 1e-5)
    out.append(Case(name="constant-row", args=args, grads=(0, 1, 2)))
    return out


SPEC = OpSpec(
    name="layer_norm",
    promise="layer_norm(x_SBH, weight_H fp32, bias_H fp32, eps) -> (x - mean) / sqrt(variance + eps) * weight + bias.",
    order="A row's elements in an order fixed by H; parameter gradients' rows in an order fixed by their number.",
    cases=cases,
    tolerance=tolerances(3e-5, 1e-2, "two sums of up to 1,030 elements in fp32"),
    cuts=(Cut(name="rows", level=Guarantee.BATCH, args={0: 0}),),
)
