"""``moe_unpermute`` by gathers: forward through the map, backward through its inverse."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.launch import rows_of
from megatron.core.ops.moe_permute.row_copies import SOURCES, rows_to_tokens, tokens_to_rows
from megatron.core.ops.registry import Guarantee, Variant


class _MoEUnpermute(Node):
    @staticmethod
    def forward(ctx, rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of_TJ)
        ctx.num_rows = rows_RH.shape[0]
        return rows_to_tokens(rows_RH, row_of_TJ)

    @staticmethod
    def backward(ctx, dx_TH: torch.Tensor):
        (row_of_TJ,) = ctx.saved_tensors
        return tokens_to_rows(rows_of(dx_TH), row_of_TJ, ctx.num_rows), None


def moe_unpermute(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference."""
    return _MoEUnpermute.apply(rows_of(rows_RH), row_of_TJ.contiguous())


VARIANT = Variant(
    name="deterministic_triton",
    fn=moe_unpermute,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="A token's rows are added by the program that owns the token, j ascending; backward copies.",
    sources=SOURCES,
)
