"""Contract of ``rms_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Odd, narrow and wide rows, none, one, more than partial sums, magnitudes from 1e-18 to 1e15, rows of zeros."""
    draw = Samples(generator, dtype, device)
    out = []
    sizes = (((5, 3, 33), 1.0), ((0, 2, 8), 1.0), ((1, 1, 1), 1.0), ((7, 1030), 1e15), ((4, 64), 1e-18))
    for shape, scale in (*sizes, ((517, 1100), 1.0), ((5, 3100), 1.0), ((3, 12300), 1.0)):
        weight = draw.normal(shape[-1], shift=1.0, fp32=True)
        out.append(Case(name=f"{shape}-{scale:g}", args=(draw.normal(*shape, scale=scale), weight, 1e-5), grads=(0, 1)))
    rows = draw.normal(6, 48)
    rows[2] = 0.0
    out.append(Case(name="zero-row", args=(rows, draw.normal(48, fp32=True), 1e-6), grads=(0, 1)))
    return out


SPEC = OpSpec(
    name="rms_norm",
    promise="rms_norm(x_SBH, weight_H fp32, eps) -> x / sqrt(mean over H of x^2 + eps) * weight, for any leading dims.",
    order="A row's squares in an order fixed by H; the weight gradient's rows in an order fixed by their number.",
    cases=cases,
    tolerance=tolerances(2e-5, 1e-2, "sums of up to 12,300 squares in fp32"),
    cuts=(Cut(name="rows", level=Guarantee.BATCH, args={0: 0}),),
)
