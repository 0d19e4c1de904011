"""Contract of ``causal_conv1d``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Sequences shorter than the window, long ones, no samples, odd channels, a strided slice of a wider projection."""
    draw = Samples(generator, dtype, device)
    out = []
    for batch, length, channels, width in ((2, 9, 33, 4), (1, 2, 5, 4), (0, 4, 8, 4), (3, 1, 7, 1), (2, 330, 40, 3)):
        weight, bias = draw.normal(channels, width, fp32=True), draw.normal(channels, fp32=True)
        args = (draw.normal(batch, length, channels), weight, bias)
        out.append(Case(name=f"B{batch}-S{length}-C{channels}-W{width}", args=args, grads=(0, 1, 2)))
    wide = draw.normal(2, 17, 50, scale=8.0)
    args = (wide[:, :, 11:37], draw.normal(26, 4, fp32=True), draw.normal(26, fp32=True))
    out.append(Case(name="strided", args=args, grads=(0, 1, 2)))
    sequence_first = draw.normal(17, 2, 24)
    args = (sequence_first.transpose(0, 1), draw.normal(24, 4, fp32=True), draw.normal(24, fp32=True))
    out.append(Case(name="sequence-first", args=args, grads=(0, 1, 2)))
    return out


SPEC = OpSpec(
    name="causal_conv1d",
    promise="causal_conv1d(x_BSC, weight_CW fp32, bias_C fp32) -> silu(bias + sum over w of "
    "weight[w] * x[s - W + 1 + w]).",
    order="Bias first, then taps ascending; parameter gradients over B and S in an order fixed by their sizes.",
    cases=cases,
    tolerance=tolerances(2e-5, 1e-2, "4 products in fp32; parameter gradients sum up to 660 positions"),
    cuts=(Cut(name="samples", level=Guarantee.BATCH, args={0: 0}),),
)
