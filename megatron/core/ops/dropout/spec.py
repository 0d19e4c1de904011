"""Contract of ``dropout``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

KEY = (0x243F6A88, 0x85A308D3)


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """A whole tensor, boxes of a larger one with short and long rows, at multiples of 4 or not, indices beyond 2^32,
    nothing dropped, almost all dropped, empty."""
    draw = Samples(generator, dtype, device)
    out = []
    for name, shape, box, p in (
        ("whole", (5, 3, 33), ((0, 5), (0, 3), (0, 33)), 0.1),
        ("box", (64, 8, 40), ((10, 17), (2, 5), (8, 39)), 0.5),
        ("long-rows", (6, 5001), ((1, 4), (3, 4999)), 0.25),
        ("multiples-of-4", (6, 8, 64), ((1, 5), (2, 7), (8, 61)), 0.25),
        ("far", (1 << 20, 1 << 16), ((1 << 19, (1 << 19) + 6), (7, 50)), 0.3),
        ("none", (4, 9), ((0, 4), (0, 9)), 0.0),
        ("most", (4, 90), ((0, 4), (0, 90)), 0.999),
        ("empty", (4, 9), ((2, 2), (0, 9)), 0.1),
    ):
        x = draw.normal(*(stop - start for start, stop in box))
        out.append(Case(name=name, args=(x, KEY, shape, box, p), grads=(0,)))
    infinite = draw.normal(6, 50)
    infinite[2] = float("inf")
    out.append(Case(name="infinite", args=(infinite, KEY, (6, 50), ((0, 6), (0, 50)), 0.4), grads=(0,)))
    return out


def _cut_box(args: list, start: int, stop: int) -> list:
    first, *rest = args[3]
    args[3] = ((first[0] + start, first[0] + stop), *rest)
    return args


SPEC = OpSpec(
    name="dropout",
    promise="dropout(x, key, shape, box, p) -> x / (1 - p) where Philox(key, global index) keeps the element, "
    "else +0.0; x is the box ((start, stop), ...) of a global tensor of that shape.",
    order="Elementwise; the backward uses the same mask.",
    cases=cases,
    tolerance=tolerances(1e-6, 1e-2, "one fp32 product"),
    exact=True,
    cuts=(Cut(name="first-dim", level=Guarantee.LAYOUT, args={0: 0}, adjust=_cut_box),),
)
