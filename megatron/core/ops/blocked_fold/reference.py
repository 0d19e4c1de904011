"""The definition of ``blocked_fold``: one vector addition per slot."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def blocked_fold(slots_Rn: torch.Tensor, block: int) -> torch.Tensor:
    """Sum ``slots_Rn`` (any floating type) over R in fp32 (fp64 stays): left to right inside blocks of ``block``
    slots, then over block sums. The first term of every sum is copied, so that -0.0 survives."""
    wide = torch.float64 if slots_Rn.dtype == torch.float64 else torch.float32
    total: torch.Tensor | None = None
    for start in range(0, slots_Rn.shape[0], block):
        members = slots_Rn[start : start + block]
        part = members[0].to(wide, copy=True)
        for term in members[1:]:
            part.add_(term)
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("blocked_fold needs at least one slot")
    return total


VARIANT = Variant(
    name="reference",
    fn=blocked_fold,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float64}),
    why="Elementwise additions in slot order; nothing else touches an element.",
)
