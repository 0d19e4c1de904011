"""Contract of ``attention``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

SHAPES = ((17, 2, 4, 2, 16), (1, 1, 2, 2, 8), (33, 1, 6, 1, 24), (64, 2, 2, 2, 32), (5, 0, 2, 1, 8))
"""Sequence, batch, heads, groups, head width."""


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Odd lengths, one position, grouped and single keys, no samples, large scores, strided inputs."""
    draw = Samples(generator, dtype, device)
    out = []
    for length, batch, heads, groups, width in SHAPES:
        q = draw.normal(length, batch, heads, width)
        k, v = draw.normal(length, batch, groups, width), draw.normal(length, batch, groups, width)
        name = f"S{length}-B{batch}-N{heads}-G{groups}-D{width}"
        out.append(Case(name=name, args=(q, k, v, width**-0.5), grads=(0, 1, 2)))
    packed = draw.normal(19, 2, 2, 4 * 16, scale=4.0)
    q, k, v = packed[..., :32].unflatten(-1, (2, 16)).flatten(2, 3), packed[..., 32:48], packed[..., 48:]
    out.append(Case(name="strided-large", args=(q, k, v, 0.25), grads=(0, 1, 2)))
    return out


SPEC = OpSpec(
    name="attention",
    promise="attention(q_SBND, k_SBGD, v_SBGD, scale) -> softmax over t <= s of q k scale, times v; "
    "head n reads group n // (N / G).",
    order="Fixed by the shapes and by the variant.",
    cases=cases,
    tolerance=tolerances(5e-5, 2e-2, "fp32 dot products and softmax over up to 64 positions, scores up to 60"),
    cuts=(Cut(name="samples", level=Guarantee.BATCH, args={0: 1, 1: 1, 2: 1}, outs=(1,)),),
)
