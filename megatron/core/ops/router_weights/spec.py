"""Contract of ``router_weights``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One, some and all of few and many experts, with and without division and factor, scores of columns and tiny ones,
    more rows than a program takes, one row, none."""
    draw = Samples(generator, dtype, device)
    out = []
    for tokens, experts, k, normalise, factor in (
        (33, 12, 5, True, 2.5),
        (33, 12, 5, False, None),
        (7, 1, 1, True, None),
        (65, 9, 1, False, 2.5),
        (9, 512, 22, True, 0.3),
        (5, 7, 7, True, 1.0),
        (1, 130, 6, True, None),
        (301, 32, 6, True, 2.5),
        (0, 8, 2, True, 2.5),
    ):
        args = (draw.uniform(tokens, experts, low=0.1, fp32=True), draw.choices(tokens, experts, k), normalise, factor)
        out.append(Case(name=f"{tokens}x{experts}-k{k}-{normalise}-{factor}", args=args, grads=(0,)))
    columns = draw.uniform(11, 34, low=0.1, fp32=True).t()
    out.append(Case(name="columns", args=(columns, draw.choices(34, 11, 3), True, 2.5), grads=(0,)))
    wider = draw.uniform(21, 40, low=0.1, fp32=True)[:, 3:34]
    out.append(Case(name="wider", args=(wider, draw.choices(21, 31, 4), True, None), grads=(0,)))
    tiny = draw.uniform(6, 5, low=1e-3, fp32=True) * 1e-9
    out.append(Case(name="tiny", args=(tiny, draw.choices(6, 5, 2), True, 1e-9), grads=(0,)))
    return out


SPEC = OpSpec(
    name="router_weights",
    promise="router_weights(score_TE fp32, ids_Tk int64, normalise, factor or None) -> weight_Tk fp32: the chosen "
    "scores, each over their sum + 1e-20 if normalised, times the factor.",
    order="A row's k chosen scores, in an order fixed by k; a row's ids differ.",
    cases=cases,
    tolerance=tolerances(1e-5, 1e-5, "sums of up to 22 scores and four roundings more, all in fp32"),
    cuts=(Cut(name="tokens", level=Guarantee.LAYOUT, args={0: 0, 1: 0}),),
)
