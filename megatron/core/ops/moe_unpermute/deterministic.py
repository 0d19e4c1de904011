"""``moe_unpermute`` as an ordered sum, its backward as a gather."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.moe_permute.deterministic import gather_sum, scatter_rows
from megatron.core.ops.registry import Guarantee, Variant


class _Unpermute(Node):
    @staticmethod
    def forward(ctx, rows_RH, row_of_TJ):
        ctx.save_for_backward(row_of_TJ)
        ctx.num_rows = rows_RH.shape[0]
        return gather_sum(rows_RH, row_of_TJ)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_TH):
        (row_of_TJ,) = ctx.saved_tensors
        return scatter_rows(dx_TH, row_of_TJ, ctx.num_rows), None


def moe_unpermute(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    return _Unpermute.apply(rows_RH, row_of_TJ)


VARIANT = Variant(
    name="deterministic",
    fn=moe_unpermute,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="One elementwise fp32 addition per j, ascending; backward copies to distinct rows.",
    sources=("megatron.core.ops.moe_permute.deterministic",),
)
