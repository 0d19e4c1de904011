"""The definition of ``embedding_grad``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def embedding_grad(main_grad_VH: torch.Tensor, dy_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
    """Add every token's gradient to its row, one token after the other; ids outside the table are skipped."""
    with torch.no_grad():
        for dy_H, row in zip(widen(dy_TH), ids_T.tolist(), strict=True):
            if 0 <= row < main_grad_VH.shape[0]:
                main_grad_VH[row].add_(dy_H)


VARIANT = Variant(
    name="reference",
    fn=embedding_grad,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="One elementwise addition per token, in the order of positions.",
)
