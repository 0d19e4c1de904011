"""The definition of ``moe_unpermute``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def moe_unpermute(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """Add rows ``row_of_TJ[t, :]`` of token t; -1 means no row. Entries that are not -1 must be distinct."""
    wide_RH = widen(rows_RH)
    # Index -1 reads the row of zeros at the end.
    padded = torch.cat((wide_RH, wide_RH.new_zeros(1, rows_RH.shape[1])))
    total_TH = wide_RH.new_zeros(row_of_TJ.shape[0], rows_RH.shape[1])
    for row_of_T in row_of_TJ.unbind(1):
        total_TH = total_TH + padded[row_of_T]
    return total_TH.to(rows_RH.dtype)


VARIANT = Variant(
    name="reference",
    fn=moe_unpermute,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="One elementwise addition per copy, j ascending; every row is read at most once, so its gradient is a copy.",
)
