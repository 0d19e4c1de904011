"""Contract of ``sgd_step``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances
from megatron.core.ops.sgd_step.scalars import SGDScalars


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """With and without decay, momentum and clipping, odd lengths, nothing, tiny and huge gradients."""
    del dtype
    draw = Samples(generator, torch.float32, device)
    out = []
    for name, numel, momentum, decay, clip, scale in (
        ("usual", 3 * 1024 + 7, 0.9, 0.1, 0.37, 1.0),
        ("plain", 1025, 0.0, 0.0, 1.0, 1.0),
        ("tiny", 513, 0.9, 0.1, 1.0, 1e-25),
        ("huge", 513, 0.9, 0.1, 1e-3, 1e15),
        ("empty", 0, 0.9, 0.1, 1.0, 1.0),
    ):
        scalars = SGDScalars(lr=1e-2, momentum=momentum, weight_decay=decay, clip_factor=clip)
        args = (draw.normal(numel), draw.normal(numel, scale=scale), draw.normal(numel, scale=scale), scalars)
        out.append(Case(name=name, args=args, writes=(0, 2)))
    return out


_EACH: dict[int | str, int] = {0: 0, 1: 0, 2: 0}

SPEC = OpSpec(
    name="sgd_step",
    promise="sgd_step(param, grad, buffer, scalars): buffer = momentum * buffer + clip_factor * grad + weight_decay * "
    "param; param -= lr * buffer; in place on flat fp32 tensors, grad is not changed. torch.optim.SGD's update.",
    order="Elementwise: separate fp32 products and sums, no fused multiply-add.",
    cases=cases,
    tolerance=tolerances(2e-6, 2e-6, "a handful of fp32 operations; all tensors are fp32"),
    cuts=(
        Cut(name="elements", level=Guarantee.LAYOUT, args=_EACH, outs=(0, 0)),
        Cut(name="blocks", level=Guarantee.LAYOUT, args=_EACH, outs=(0, 0), unit=1024),
    ),
)
