"""Contract of ``rope``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Full and partial rotation, odd rest, no positions, angles of late positions, many heads."""
    draw = Samples(generator, dtype, device)
    out = []
    for shape, half, reach in (
        ((9, 2, 3, 16), 8, 1.0),
        ((5, 1, 2, 13), 3, 4096.0),
        ((0, 2, 3, 8), 4, 1.0),
        ((3, 2, 1, 6), 0, 1.0),
        ((33, 1, 5, 32), 16, 8192.0),
        ((2, 1, 40, 128), 64, 131072.0),
    ):
        angle = draw.uniform(shape[0], shape[1], half, high=reach, fp32=True)
        out.append(Case(name=f"{shape}-R{half}-{reach:g}", args=(draw.normal(*shape), angle), grads=(0,)))
    return out


SPEC = OpSpec(
    name="rope",
    promise="rope(x_SBND, angle_SBR fp32) -> the first 2R of D rotated by halves: (a cos - b sin, b cos + a sin).",
    order="Elementwise; nothing is added across positions.",
    cases=cases,
    tolerance=tolerances(2e-6, 1e-2, "sine and cosine in fp32, two products and a sum"),
    cuts=(
        Cut(name="positions", level=Guarantee.BATCH, args={0: 0, 1: 0}),
        Cut(name="heads", level=Guarantee.LAYOUT, args={0: 2}, outs=(2,)),
    ),
)
