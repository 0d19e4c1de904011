"""Contract of ``embedding_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Heavy repeats, one id everywhere, ids outside, no tokens, terms whose order shows."""
    draw = Samples(generator, dtype, device)
    few = draw.integers(200, low=0, high=3)
    mixed = torch.where(draw.keep(96, share=0.5), 4, draw.integers(96, low=-2, high=13))
    one = torch.full((150,), 2, dtype=torch.int64, device=device)
    none = draw.integers(0, low=0, high=3)
    outside = torch.tensor([-1, 9, 100, -7], device=device)
    out = []
    for name, vocabulary, width, ids in (
        ("repeats", 3, 17, few),
        ("mixed", 11, 33, mixed),
        ("one-id", 5, 8, one),
        ("empty", 3, 4, none),
        ("outside", 9, 4, outside),
    ):
        main_grad = draw.normal(vocabulary, width, fp32=True)
        dy = draw.normal(ids.numel(), width) * 10.0 ** draw.integers(ids.numel(), 1, low=-3, high=4)
        out.append(Case(name=name, args=(main_grad, dy.to(dtype), ids), writes=(0,)))
    return out


SPEC = OpSpec(
    name="embedding_grad",
    promise="embedding_grad(main_grad_VH fp32, dy_TH, ids_T int64): main_grad[ids[t]] += dy[t], in place; "
    "ids outside [0, V) are skipped.",
    order="Each row adds its tokens one by one in the order of positions, in fp32, on top of what it held.",
    cases=cases,
    tolerance=tolerances(2e-5, 2e-5, "up to 200 fp32 additions of terms up to 1e4; the main gradient is fp32"),
    exact=True,
    cuts=(Cut(name="width", level=Guarantee.LAYOUT, args={0: 1, 1: 1}, outs=(1,)),),
)
