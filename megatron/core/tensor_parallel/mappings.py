"""Borders of tensor-parallel regions: what moves between ranks forward, and what moves back in the gradient.

Sums over ranks go through ``context.sums``, everything else is a copy. On one tensor-parallel rank all are no-ops.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.process_groups.collectives import all_gather, all_to_all
from megatron.core.tensor_parallel.context import ModelContext


def gather_rows(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Every rank's rows, concatenated along dimension 0 in rank order; no autograd."""
    return all_gather(context.groups.tp, x).flatten(0, 1)


class _CopyToTp(Node):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ModelContext) -> torch.Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.context.sums.all_reduce(ctx.context.groups.tp, grad.contiguous()), None


class _ReduceFromTp(Node):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ModelContext) -> torch.Tensor:
        return context.sums.all_reduce(context.groups.tp, x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ReduceScatterToSequence(Node):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ModelContext) -> torch.Tensor:
        ctx.context = context
        return context.sums.reduce_scatter_rows(context.groups.tp, x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grad.contiguous(), ctx.context), None


class _GatherColumns(Node):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ModelContext) -> torch.Tensor:
        ctx.context = context
        return torch.cat(all_gather(context.groups.tp, x).unbind(0), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        tp = ctx.context.groups.tp
        pieces = torch.stack(grad.chunk(tp.size, dim=-1))
        return ctx.context.sums.reduce_scatter_rows(tp, pieces).squeeze(0), None


class _ColumnsToResidual(Node):
    """Complete columns: under sequence parallelism all columns of this rank's rows, else all of everything. Backward
    takes the gradient, which is complete, the same way back; nothing is added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ModelContext) -> torch.Tensor:
        ctx.context, tp = context, context.groups.tp
        if context.cuts_sequence:
            return torch.cat(all_to_all(tp, x.reshape(tp.size, -1, *x.shape[1:])).unbind(0), dim=-1)
        return torch.cat(all_gather(tp, x).unbind(0), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        tp = ctx.context.groups.tp
        pieces = grad.chunk(tp.size, dim=-1)
        if ctx.context.cuts_sequence:
            return all_to_all(tp, torch.stack(pieces)).flatten(0, 1), None
        return pieces[tp.rank].contiguous(), None


def copy_to_tp(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Enter a tensor-parallel region with a replicated activation: identity; gradients are summed over the ranks."""
    return _CopyToTp.apply(x, context) if context.groups.tp.size > 1 else x


def reduce_from_tp(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Leave a tensor-parallel region with partial sums: summed over the ranks; the gradient is copied."""
    return _ReduceFromTp.apply(x, context) if context.groups.tp.size > 1 else x


def reduce_scatter_to_sequence(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Partial sums ``[S, ...]`` to this rank's rows ``[S / TP, ...]`` of their sum; the gradient is gathered."""
    return _ReduceScatterToSequence.apply(x, context) if context.groups.tp.size > 1 else x


def gather_columns(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """``[..., X / TP]`` to ``[..., X]``; each rank gets its columns of the summed gradient."""
    return _GatherColumns.apply(x, context) if context.groups.tp.size > 1 else x


def leave_tp(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Sum partial results in the form the residual stream has: cut along the sequence or replicated."""
    return reduce_scatter_to_sequence(x, context) if context.cuts_sequence else reduce_from_tp(x, context)


def columns_to_residual(x: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """``[S, B, X / TP]``, columns cut over the ranks, to the residual stream's form: ``[S, B, X]`` on every rank, or
    this rank's positions of it under sequence parallelism."""
    return _ColumnsToResidual.apply(x, context) if context.groups.tp.size > 1 else x
