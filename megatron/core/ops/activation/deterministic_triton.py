"""``activation`` as one Triton kernel each way; the backward also makes the gradient of the rows' weights."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.activation.kernels.activation import KINDS, activation_bwd_kernel, activation_fwd_kernel
from megatron.core.ops.launch import Launch, row_launch, rows_of
from megatron.core.ops.registry import Guarantee, Variant

MAX_BLOCK = 2048
"""Longest piece of a row in one tile; longer rows take several."""


def _launch(width: int) -> Launch:
    return row_launch("activation", min(width, MAX_BLOCK))


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RF: torch.Tensor, kind: int, weight_R: torch.Tensor | None) -> torch.Tensor:
        rows = x_RF.shape[0]
        width = x_RF.shape[1] // (2 if kind == KINDS["swiglu"] else 1)
        out_RF = torch.empty(rows, width, dtype=x_RF.dtype, device=x_RF.device)
        launch = _launch(width)
        if out_RF.numel():
            activation_fwd_kernel[(triton.cdiv(rows, launch.rows), triton.cdiv(width, launch.block))](
                x_ptr=x_RF,
                weight_ptr=weight_R,
                out_ptr=out_RF,
                num_rows=rows,
                width=width,
                x_stride=x_RF.stride(0),
                KIND=kind,
                WEIGHTED=weight_R is not None,
                ROWS=launch.rows,
                BLOCK=launch.block,
                num_warps=launch.num_warps,
            )
        ctx.save_for_backward(x_RF, weight_R)
        ctx.kind = kind
        return out_RF

    @staticmethod
    def backward(ctx, dout_RF: torch.Tensor):
        x_RF, weight_R = ctx.saved_tensors
        rows, width = dout_RF.shape
        dx_RF = torch.empty(x_RF.shape, dtype=x_RF.dtype, device=x_RF.device)
        dweight_R = None if weight_R is None else torch.empty(rows, dtype=torch.float32, device=x_RF.device)
        launch = _launch(width)
        if dout_RF.numel():
            activation_bwd_kernel[(triton.cdiv(rows, launch.rows),)](
                x_ptr=x_RF,
                weight_ptr=weight_R,
                dout_ptr=dout_RF.contiguous(),
                dx_ptr=dx_RF,
                dweight_ptr=dweight_R,
                num_rows=rows,
                width=width,
                x_stride=x_RF.stride(0),
                dx_stride=dx_RF.stride(0),
                KIND=ctx.kind,
                WEIGHTED=weight_R is not None,
                ROWS=launch.rows,
                BLOCK=launch.block,
                num_warps=launch.num_warps,
            )
        return dx_RF, None, None if weight_R is None else dweight_R.to(weight_R.dtype)


def activation(x_RF: torch.Tensor, kind: str, weight_R: torch.Tensor | None) -> torch.Tensor:
    """Same contract as the reference.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}")
    weights = None if weight_R is None else weight_R.contiguous()
    out_RF = _Activation.apply(rows_of(x_RF), KINDS[kind], weights)
    return out_RF.view(*x_RF.shape[:-1], out_RF.shape[-1])


VARIANT = Variant(
    name="deterministic_triton",
    fn=activation,
    guarantee={"cuda": Guarantee.BATCH},
    why="Elementwise; a row's weight gradient is added by the program that owns the row, in an order fixed by F.",
    sources=("megatron.core.ops.activation.kernels.activation", "megatron.core.ops.launch"),
)
