"""Contract of ``embedding``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Repeats, ids outside on both sides, no tokens, an id whose row is not finite."""
    draw = Samples(generator, dtype, device)
    table = draw.normal(9, 7)
    table[0] = float("inf")
    return [
        Case(name="inside", args=(draw.normal(33, 20), draw.integers(50, low=0, high=33))),
        Case(name="outside", args=(draw.normal(5, 9), draw.integers(64, low=-6, high=11))),
        Case(name="empty", args=(draw.normal(5, 9), draw.integers(0, low=0, high=5))),
        Case(name="row-not-finite", args=(table, torch.tensor([-1, 9, 3, 100], device=device))),
    ]


SPEC = OpSpec(
    name="embedding",
    promise="embedding(weight_VH, ids_T int64) -> x_TH = weight[ids]; ids outside [0, V) give rows of +0.0.",
    order="Copies; nothing is added.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "copies"),
    exact=True,
    cuts=(Cut(name="tokens", level=Guarantee.LAYOUT, args={1: 0}),),
)
