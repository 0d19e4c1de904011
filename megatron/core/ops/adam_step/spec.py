"""Contract of ``adam_step``."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_step.scalars import AdamScalars
from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """First and late steps, with and without decay and clipping, odd lengths, nothing, tiny and huge gradients."""
    del dtype
    draw = Samples(generator, torch.float32, device)
    out = []
    for name, numel, step, decay, clip, scale in (
        ("first", 1025, 1, 0.1, 1.0, 1.0),
        ("late", 3 * 1024 + 7, 100_000, 0.1, 0.37, 1.0),
        ("no-decay", 77, 3, 0.0, 1.0, 1e-3),
        ("tiny", 513, 2, 0.1, 1.0, 1e-25),
        ("huge", 513, 2, 0.1, 1e-3, 1e15),
        ("empty", 0, 1, 0.1, 1.0, 1.0),
    ):
        scalars = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay, step=step, clip_factor=clip)
        moment = draw.normal(numel, scale=scale if step > 1 else 0.0)
        second = draw.uniform(numel).square() * (scale * scale if step > 1 else 0.0)
        args = (draw.normal(numel), draw.normal(numel, scale=scale), moment, second, scalars)
        out.append(Case(name=name, args=args, writes=(0, 2, 3)))
    return out


_EACH: dict[int | str, int] = {0: 0, 1: 0, 2: 0, 3: 0}

SPEC = OpSpec(
    name="adam_step",
    promise="adam_step(param, grad, exp_avg, exp_avg_sq, scalars): AdamW (Loshchilov and Hutter, arXiv 1711.05101) "
    "in place on flat fp32 tensors; grad is multiplied by clip_factor first and is not changed.",
    order="Elementwise: separate fp32 products and sums, no fused multiply-add.",
    cases=cases,
    tolerance=tolerances(2e-6, 2e-6, "a dozen fp32 operations; all tensors are fp32"),
    cuts=(
        Cut(name="elements", level=Guarantee.LAYOUT, args=_EACH, outs=(0, 0, 0)),
        Cut(name="blocks", level=Guarantee.LAYOUT, args=_EACH, outs=(0, 0, 0), unit=1024),
    ),
)
