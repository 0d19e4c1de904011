"""``embedding_grad`` through ``index_add_`` on the CPU."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def embedding_grad(main_grad_VH: torch.Tensor, dy_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
    """See the reference."""
    with torch.no_grad():
        inside = ((ids_T >= 0) & (ids_T < main_grad_VH.shape[0])).nonzero().squeeze(1)
        whole = inside.numel() == ids_T.numel()
        dy = dy_TH if whole else dy_TH[inside]
        main_grad_VH.index_add_(0, ids_T if whole else ids_T[inside], dy.float())


VARIANT = Variant(
    name="deterministic_index_add",
    fn=embedding_grad,
    guarantee={"cpu": Guarantee.LAYOUT},
    why="On the CPU index_add_ of rows adds one row after the other in index order (tested bit by bit).",
)
