"""Contract of ``cross_entropy_stats``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Targets elsewhere, padding columns full of NaN, a shard of padding only, no tokens, huge logits, columns of -inf
    up to a late one and everywhere."""
    draw = Samples(generator, dtype, device)
    padded = draw.normal(7, 40)
    padded[:, 33:] = float("nan")
    masked = draw.normal(3, 9001)
    masked[0, :8500], masked[1], masked[2, 8000:] = float("-inf"), float("-inf"), float("-inf")
    return [
        Case(name="masked", args=(masked, draw.integers(3, low=8600, high=9001), 9001)),
        Case(name="whole", args=(draw.normal(9, 33), draw.integers(9, low=0, high=33), 33)),
        Case(name="elsewhere", args=(draw.normal(9, 33), draw.integers(9, low=-1, high=3), 33)),
        Case(name="padded", args=(padded, draw.integers(7, low=-1, high=33), 33)),
        Case(name="padding-only", args=(padded, draw.integers(7, low=-1, high=0), 0)),
        Case(name="one-column", args=(draw.normal(3, 8), draw.integers(3, low=-1, high=1), 1)),
        Case(name="empty", args=(draw.normal(0, 8), draw.integers(0, low=0, high=8), 8)),
        Case(name="huge", args=(draw.normal(5, 1030, scale=1e4), draw.integers(5, low=0, high=1030), 1030)),
    ]


SPEC = OpSpec(
    name="cross_entropy_stats",
    promise="cross_entropy_stats(logits_TV, target_T, num_valid) -> fp32 max_T, sum_T of exp(logit - max), "
    "target_logit_T; columns from num_valid on are ignored (none left, or all -inf: -inf, 0); "
    "target -1: not in this shard, logit 0.",
    order="A row's exponentials in an order fixed by num_valid.",
    cases=cases,
    tolerance=tolerances(2e-5, 2e-5, "sums of up to 8,000 exponentials in fp32; results are fp32"),
    cuts=(Cut(name="tokens", level=Guarantee.BATCH, args={0: 0, 1: 0}, outs=(0, 0, 0)),),
)
