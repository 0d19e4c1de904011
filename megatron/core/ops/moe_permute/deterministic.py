"""``moe_permute`` as a gather, its backward as an ordered sum: every row is read or written once, nothing is sorted."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.registry import Guarantee, Variant


def scatter_rows(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``rows[row_of[t, j]] = x[t]``, zeros elsewhere."""
    copies = row_of_TJ.shape[1]
    entry = torch.arange(row_of_TJ.numel(), device=row_of_TJ.device)
    # One row more takes the absent entries, whose order does not matter because it is dropped.
    entry_of_row = entry.new_full((num_rows + 1,), -1)
    entry_of_row[torch.where(row_of_TJ < 0, num_rows, row_of_TJ).flatten()] = entry
    token_of_R = entry_of_row[:num_rows].div(max(copies, 1), rounding_mode="floor")
    if not x_TH.shape[0]:
        return x_TH.new_zeros(num_rows, x_TH.shape[1])
    return x_TH.index_select(0, token_of_R.clamp(min=0)).masked_fill_((token_of_R < 0).unsqueeze(1), 0.0)


def gather_sum(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """fp32 sum over j ascending of ``rows[row_of[t, j]]`` from +0.0, rounded once to the type of the rows."""
    total_TH = torch.zeros(row_of_TJ.shape[0], rows_RH.shape[1], dtype=torch.float32, device=rows_RH.device)
    for row_of_T in row_of_TJ.unbind(1) if rows_RH.shape[0] else ():
        term_TH = rows_RH.index_select(0, row_of_T.clamp(min=0))
        total_TH.add_(term_TH.masked_fill_((row_of_T < 0).unsqueeze(1), 0.0))
    return total_TH.to(rows_RH.dtype)


class _Permute(Node):
    @staticmethod
    def forward(ctx, x_TH, row_of_TJ, num_rows):
        ctx.save_for_backward(row_of_TJ)
        return scatter_rows(x_TH, row_of_TJ, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows_RH):
        (row_of_TJ,) = ctx.saved_tensors
        return gather_sum(drows_RH, row_of_TJ), None, None


def moe_permute(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """See the reference."""
    return _Permute.apply(x_TH, row_of_TJ, num_rows)


VARIANT = Variant(
    name="deterministic",
    fn=moe_permute,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Copies, then one elementwise fp32 addition per j, ascending; the inverse map has distinct entries.",
)
