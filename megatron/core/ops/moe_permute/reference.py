"""The definition of ``moe_permute``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def moe_permute(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Put token t into rows ``row_of_TJ[t, :]``; -1 means no row. Entries that are not -1 must be distinct."""
    wide_TH = widen(x_TH)
    rows_RH = wide_TH.new_zeros(num_rows, x_TH.shape[1])
    # Autograd runs the last use first: writing j downwards makes the gradients add up over j upwards.
    for row_of_T in reversed(row_of_TJ.unbind(1)):
        token = (row_of_T >= 0).nonzero().squeeze(1)
        rows_RH = rows_RH.index_put((row_of_T[token],), wide_TH[token])
    return rows_RH.to(x_TH.dtype)


VARIANT = Variant(
    name="reference",
    fn=moe_permute,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Copies to distinct rows; autograd adds the gradients of one token use by use, j ascending.",
)
