"""Contract of ``blocked_fold``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec, Tolerance

SPECIALS = (0.0, -0.0, 1e-41, -1e-41, 1e30, -1e30, 1.0)


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Slots of odd lengths with signed zeros and denormals, whole and short last blocks."""
    out = []
    for ranks, numel, block in (
        (1, 7, 1),
        (2, 1024, 2),
        (3, 1025, 2),
        (8, 513, 8),
        (8, 513, 4),
        (6, 2048, 4),
        (4, 0, 4),
    ):
        slots = torch.randn(ranks, numel, generator=generator, dtype=torch.float32)
        pick = torch.randint(0, len(SPECIALS), (ranks, numel), generator=generator)
        special = torch.rand(ranks, numel, generator=generator) < 0.3
        slots = torch.where(special, torch.tensor(SPECIALS)[pick], slots)
        out.append(Case(name=f"R{ranks}-n{numel}-B{block}", args=(slots.to(dtype).to(device), block)))
    return out


SPEC = OpSpec(
    name="blocked_fold",
    promise="blocked_fold(slots, block, out=None) -> fp32 [n]: the sum over R slots [n], rows of a tensor or a list.",
    order="Left to right inside blocks of `block` slots, then block sums left to right; the first term is copied.",
    cases=cases,
    tolerance={
        t: Tolerance(rtol=1e-6, atol=2.0**-22, reason="up to 8 fp32 additions of terms up to 1e30 that may cancel")
        for t in (torch.float32, torch.bfloat16)
    },
    exact=True,
    cuts=(Cut(name="elements", level=Guarantee.LAYOUT, args={0: 1}),),
)
