"""``moe_permute`` by gathers: forward through the inverse map, backward through the map itself."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.launch import rows_of
from megatron.core.ops.moe_permute.row_copies import SOURCES, rows_to_tokens, tokens_to_rows
from megatron.core.ops.registry import Guarantee, Variant


class _MoEPermute(Node):
    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(row_of_TJ)
        return tokens_to_rows(x_TH, row_of_TJ, num_rows)

    @staticmethod
    def backward(ctx, drows_RH: torch.Tensor):
        (row_of_TJ,) = ctx.saved_tensors
        return rows_to_tokens(rows_of(drows_RH), row_of_TJ), None, None


def moe_permute(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Same contract as the reference."""
    return _MoEPermute.apply(rows_of(x_TH), row_of_TJ.contiguous(), num_rows)


VARIANT = Variant(
    name="deterministic_triton",
    fn=moe_permute,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Copies; a token's gradients are added by the program that owns the token, j ascending.",
    sources=SOURCES,
)
