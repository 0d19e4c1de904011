"""Contract of ``activation``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

KINDS = ("squared_relu", "swiglu", "gelu", "gelu_tanh")
"""Kinds of activation; ``swiglu`` reads the gate from the first half of its row and halves the width."""


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every kind with and without weights, no rows, no columns, leading dims, values far out."""
    draw = Samples(generator, dtype, device)
    out = []
    for kind in KINDS:
        out += [
            Case(name=f"{kind}-plain", args=(draw.normal(5, 34), kind, None), grads=(0,)),
            Case(name=f"{kind}-leading", args=(draw.normal(3, 2, 8, scale=30.0), kind, None), grads=(0,)),
            Case(
                name=f"{kind}-weighted",
                args=(draw.normal(7, 1026), kind, draw.uniform(7, fp32=True)),
                grads=(0, 2),
            ),
            Case(name=f"{kind}-narrow", args=(draw.normal(3, 0), kind, draw.uniform(3, fp32=True)), grads=(0, 2)),
            Case(name=f"{kind}-empty", args=(draw.normal(0, 6), kind, draw.uniform(0, fp32=True)), grads=(0, 2)),
        ]
    return out


SPEC = OpSpec(
    name="activation",
    promise="activation(x_RF, kind, weight_R fp32 or None) -> act(x) * weight; swiglu: silu(first half) * second half.",
    order="Elementwise; the weight's gradient adds a row's elements in an order fixed by F.",
    cases=cases,
    tolerance=tolerances(2e-5, 1e-2, "a few fp32 operations; the weight's gradient adds up to 1,026 products"),
    cuts=(Cut(name="rows", level=Guarantee.BATCH, args={0: 0, 2: 0}),),
)
