"""The definition of ``embedding``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def embedding(weight_VH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Rows of the table; ids outside it give zeros. No autograd: ``embedding_grad`` adds the gradient."""
    with torch.no_grad():
        inside_T = (ids_T >= 0) & (ids_T < weight_VH.shape[0])
        rows_TH = weight_VH[torch.where(inside_T, ids_T, 0)]
        return rows_TH.masked_fill_(~inside_T.unsqueeze(-1), 0.0)


VARIANT = Variant(
    name="reference",
    fn=embedding,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Copies.",
)
