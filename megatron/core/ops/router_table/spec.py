"""Contract of ``router_table``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Marks only, values of three types (NaN, infinity and -0.0 among them), one and all experts, no tokens."""
    draw = Samples(generator, dtype, device)
    odd = draw.normal(33, 5, fp32=True)
    odd[0, 0], odd[1, 1], odd[2, 2] = float("nan"), float("inf"), -0.0
    return [
        Case(name="marks", args=(draw.choices(33, 12, 5), 12, None)),
        Case(name="kept", args=(draw.choices(33, 12, 5), 12, draw.keep(33, 5, share=0.5))),
        Case(name="values", args=(draw.choices(33, 12, 5), 12, odd)),
        Case(name="narrow", args=(draw.choices(70, 9, 2), 9, draw.normal(2, 70).t())),
        Case(name="k1", args=(draw.choices(5, 7, 1), 7, None)),
        Case(name="all", args=(draw.choices(5, 7, 7), 7, draw.normal(5, 7, fp32=True))),
        Case(name="empty", args=(draw.choices(0, 8, 2), 8, None)),
    ]


SPEC = OpSpec(
    name="router_table",
    promise="router_table(ids_Tk int64, experts, value_Tk or None) -> table_TE with table[t, ids[t, j]] = value[t, j]"
    ", True without values; 0 elsewhere.",
    order="Copies only; a row's ids differ.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "values are copied"),
    exact=True,
    cuts=(Cut(name="tokens", level=Guarantee.LAYOUT, args={0: 0, 2: 0}),),
)
