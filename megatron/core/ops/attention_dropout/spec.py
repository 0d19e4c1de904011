"""Contract of ``attention_dropout``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

SHAPES = ((17, 2, 4, 2, 16), (1, 1, 2, 2, 8), (33, 1, 6, 1, 24), (5, 0, 2, 1, 8))
"""Sequence, batch, heads, groups, head width."""


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Odd lengths, one position, no samples, nothing dropped, whole rows dropped."""
    draw = Samples(generator, dtype, device)
    out = []
    for length, batch, heads, groups, width in SHAPES:
        q = draw.normal(length, batch, heads, width)
        k, v = draw.normal(length, batch, groups, width), draw.normal(length, batch, groups, width)
        for p in (0.0, 0.1, 0.9):
            keep = draw.keep(batch, heads, length, length, share=1.0 - p)
            name = f"S{length}-B{batch}-N{heads}-G{groups}-D{width}-p{p}"
            out.append(Case(name=name, args=(q, k, v, width**-0.5, keep, p), grads=(0, 1, 2)))
    return out


SPEC = OpSpec(
    name="attention_dropout",
    promise="attention_dropout(q_SBND, k_SBGD, v_SBGD, scale, keep_BNSS bool, p) -> attention, "
    "its weights multiplied by keep / (1 - p).",
    order="Fixed by the shapes and by the variant.",
    cases=cases,
    tolerance=tolerances(5e-5, 2e-2, "fp32 dot products and softmax over up to 33 positions, scaled by up to 10"),
    cuts=(Cut(name="samples", level=Guarantee.BATCH, args={0: 1, 1: 1, 2: 1, 4: 0}, outs=(1,)),),
)
