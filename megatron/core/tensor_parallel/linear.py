"""Matrix product with a weight whose gradient goes straight into the fp32 main gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.contracts.parameter import ModelParameter, main_grad, use_in_fp32
from megatron.core.process_groups.collectives import all_gather
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.mappings import gather_rows


def add_weight_grad(
    param: ModelParameter, add_into: Callable[[torch.Tensor], object], stage: str = ""
) -> torch.Tensor | None:
    """Let ``add_into(buffer)`` add a gradient into the fp32 main gradient of ``param``.

    Returns what ``backward`` hands on to autograd: nothing, or the gradient in the parameter's type while no engine
    owns the parameter.
    """
    buffer = main_grad(param, stage)
    if buffer is not None:
        add_into(buffer)
        if param.on_grad is not None:
            param.on_grad(param)
        return None
    buffer = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
    add_into(buffer)
    return buffer.to(param.dtype)


def _rows(x_SBX: torch.Tensor, context: ModelContext, gather: bool) -> torch.Tensor:
    whole = all_gather(context.groups.tp, x_SBX) if gather else x_SBX
    return whole.flatten(0, -2)


class _Linear(Node):
    """y = x W^T. With ``gather`` the input is cut along the sequence: it is gathered for the product, and gathered
    again in the backward instead of being kept. With ``scatter`` the output is: the ranks' products are added."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBX: torch.Tensor,
        weight_YX: ModelParameter,
        context: ModelContext,
        cut: tuple[bool, bool],
        stage: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_SBX)
        ctx.weight, ctx.context, ctx.stage = weight_YX, context, stage
        ctx.gather, ctx.scatter = gather, scatter = cut
        # Always a product of two matrices: a batched one would be slow, and its bits could depend on strides.
        y_RY = torch.nn.functional.linear(_rows(x_SBX, context, gather), weight_YX)
        y_SBY = y_RY.view(-1, *x_SBX.shape[1:-1], y_RY.shape[1])
        return context.sums.reduce_scatter_rows(context.groups.tp, y_SBY) if scatter else y_SBY

    @staticmethod
    def backward(ctx: Any, dy_SBY: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        (x_SBX,) = ctx.saved_tensors
        context, weight = ctx.context, ctx.weight
        if ctx.scatter:
            dy_SBY = gather_rows(dy_SBY, context)
        dy_RY = dy_SBY.flatten(0, -2).contiguous()
        dx_SBX = dweight_YX = None
        if ctx.needs_input_grad[0]:
            dx_SBX = torch.mm(dy_RY, weight).view(*dy_SBY.shape[:-1], -1)
            if ctx.gather:
                dx_SBX = context.sums.reduce_scatter_rows(context.groups.tp, dx_SBX)
        if ctx.needs_input_grad[1]:
            x_RX, add = _rows(x_SBX, context, ctx.gather), context.ops["linear_grad"]
            dweight_YX = add_weight_grad(weight, lambda main_grad_YX: add(main_grad_YX, dy_RY, x_RX), ctx.stage)
        return dx_SBX, dweight_YX, None, None, None


def linear(
    x: torch.Tensor,
    weight: ModelParameter,
    context: ModelContext,
    *,
    gather: bool = False,
    scatter: bool = False,
    stage: str = "",
) -> torch.Tensor:
    """``x W^T`` in the activation type, over the last dimension of ``x``.

    With ``gather``, ``x`` holds this rank's positions ``[S / TP, ...]`` and the result all of them; the gradient of
    ``x`` is the ordered sum over the ranks, scattered back. With ``scatter`` it is the other way round: the result is
    this rank's positions of the ordered sum, and its gradient is gathered. ``stage`` names the main-gradient buffer of
    a weight that is used at both ends of the pipeline.
    """
    several = context.groups.tp.size > 1
    return _Linear.apply(x, weight, context, (gather and several, scatter and several), stage)


def add_bias(y: torch.Tensor, bias: ModelParameter | None) -> torch.Tensor:
    """``y + bias`` in fp32, rounded once. The bias gradient is torch's fp32 sum over the leading dimensions, whose
    order depends on shape and device alone."""
    return y if bias is None else (y.float() + use_in_fp32(bias)).to(y.dtype)
