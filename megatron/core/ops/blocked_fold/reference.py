"""The definition of ``blocked_fold``: one vector addition per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.registry import Guarantee, Variant


def blocked_fold(
    slots_Rn: torch.Tensor | Sequence[torch.Tensor], block: int, out_n: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over R slots ``[n]`` of one floating type, the rows of a tensor or tensors of their own, in fp32 (fp64
    stays): left to right inside blocks of ``block`` slots, then over block sums. The first term of every sum is copied,
    so that -0.0 survives. ``out_n`` takes the sum, rounded once to its type; it may be one of the slots."""
    total: torch.Tensor | None = None
    for start in range(0, len(slots_Rn), block):
        first, *others = slots_Rn[start : start + block]
        part = first.to(torch.float64 if first.dtype == torch.float64 else torch.float32, copy=True)
        for term in others:
            part.add_(term)
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("blocked_fold needs at least one slot")
    return total if out_n is None else out_n.copy_(total)


VARIANT = Variant(
    name="reference",
    fn=blocked_fold,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float64}),
    why="Elementwise additions in slot order; nothing else touches an element.",
)
