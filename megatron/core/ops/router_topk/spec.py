"""Contract of ``router_topk``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """With and without bias, k of 1 and E, many ties, all equal, signed zeros, infinities and NaN, no tokens, and
    parts of other matrices."""
    draw = Samples(generator, dtype, device)
    special = draw.normal(9, 8, fp32=True)
    special[1, 3] = float("nan")
    special[2] = float("nan")
    special[3, 5], special[3, 1] = float("inf"), float("-inf")
    special[4, ::2], special[4, 1::2] = 0.0, -0.0
    ties = draw.integers(65, 16, low=0, high=4).to(torch.float32)
    return [
        Case(name="plain", args=(draw.uniform(33, 12, fp32=True), None, 3)),
        Case(name="bias", args=(draw.uniform(33, 12, fp32=True), draw.normal(12, scale=0.1, fp32=True), 5)),
        Case(name="k1", args=(draw.uniform(5, 7, fp32=True), None, 1)),
        Case(name="all", args=(draw.uniform(5, 7, fp32=True), None, 7)),
        Case(name="ties", args=(ties, None, 6)),
        Case(name="equal", args=(torch.ones(4, 9, device=device), None, 4)),
        Case(name="special", args=(special, None, 3)),
        Case(name="empty", args=(draw.uniform(0, 8, fp32=True), draw.normal(8, fp32=True), 2)),
        Case(name="columns", args=(draw.uniform(7, 33, fp32=True).t(), draw.normal(2, 7, fp32=True)[1], 3)),
        Case(name="wider", args=(draw.uniform(33, 20, fp32=True)[:, 3:14], None, 3)),
    ]


SPEC = OpSpec(
    name="router_topk",
    promise="router_topk(score_TE fp32, bias_E fp32 or None, k) -> ids_Tk int64 of the k largest score + bias.",
    order="Ties go to the lowest id (0.0 and -0.0 tie); NaN counts as largest; ids ascend in each row.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "ids are integers"),
    exact=True,
    cuts=(Cut(name="tokens", level=Guarantee.LAYOUT, args={0: 0}),),
)
