"""Contract of ``gated_rms_norm``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One and several groups, odd widths, no rows, more rows than partial sums, gates far out on both sides."""
    draw = Samples(generator, dtype, device)
    out = []
    for shape, group, gate in (
        ((3, 5, 66), 33, 1.0),
        ((2, 4, 96), 96, 1.0),
        ((0, 3, 16), 8, 1.0),
        ((1, 1, 5), 1, 1.0),
        ((2, 3, 1030), 515, 60.0),
        ((517, 1, 1100), 1100, 1.0),
        ((9, 1, 1024), 512, 1.0),
    ):
        args = (draw.normal(*shape), draw.normal(*shape, scale=gate), draw.normal(shape[-1], shift=1.0, fp32=True))
        out.append(Case(name=f"{shape}-g{group}", args=(*args, group, 1e-5), grads=(0, 1, 2)))
    return out


SPEC = OpSpec(
    name="gated_rms_norm",
    promise="gated_rms_norm(y_BSX, z_BSX, weight_X fp32, group_size, eps) -> RMSNorm of y * silu(z) in groups of X.",
    order="A group's squares in an order fixed by its size; the weight gradient's rows by their number.",
    cases=cases,
    tolerance=tolerances(3e-5, 1e-2, "sums of up to 1,100 squares in fp32"),
    cuts=(Cut(name="rows", level=Guarantee.BATCH, args={0: 0, 1: 0}),),
)
