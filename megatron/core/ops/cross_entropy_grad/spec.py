"""Contract of ``cross_entropy_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Targets elsewhere, padding columns full of NaN, a shard of padding only, masked tokens, no tokens."""
    draw = Samples(generator, dtype, device)
    out = []
    for name, tokens, width, valid, low in (
        ("whole", 9, 33, 33, 0),
        ("elsewhere", 9, 33, 33, -1),
        ("padded", 7, 40, 33, -1),
        ("padding-only", 7, 8, 0, -1),
        ("empty", 0, 8, 8, 0),
        ("wide", 5, 1030, 1030, -1),
    ):
        logits = draw.normal(tokens, width, scale=4.0)
        log_z = torch.logsumexp(logits[:, : max(valid, 1)].float(), dim=-1) + 0.25
        logits[:, valid:] = float("nan")
        dloss = draw.uniform(tokens, fp32=True) * draw.keep(tokens, share=0.7)
        target = draw.integers(tokens, low=low, high=max(valid, low + 1))
        out.append(Case(name=name, args=(logits, target, valid, log_z, dloss)))
    return out


SPEC = OpSpec(
    name="cross_entropy_grad",
    promise="cross_entropy_grad(logits_TV, target_T, num_valid, log_z_T fp32, dloss_T fp32) -> dlogits_TV = "
    "(exp(logit - log_z) - [v is target]) * dloss; columns from num_valid on get 0; target -1: not in this shard.",
    order="Elementwise.",
    cases=cases,
    tolerance=tolerances(5e-6, 1e-2, "one exponential and one product in fp32"),
    cuts=(Cut(name="tokens", level=Guarantee.LAYOUT, args={0: 0, 1: 0, 3: 0, 4: 0}),),
)
