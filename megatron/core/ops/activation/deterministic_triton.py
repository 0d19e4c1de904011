"""``activation`` as one Triton kernel each way; the backward also makes the gradient of the rows' weights."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.activation.kernels.activation import KINDS, activation_bwd_kernel, activation_fwd_kernel
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, row_rule, rows_of
from megatron.core.ops.registry import Guarantee, Variant

MAX_BLOCK = 2048
"""Longest piece of a row in one tile; longer rows take several."""


def _rule(width: int) -> Config:
    return row_rule(min(width, MAX_BLOCK))


CHOICES = {"ROWS": (1, 2, 4), "BLOCK": (512, 1024, 2048), "num_warps": (2, 4, 8)}
FORWARD = Launch(kernel="activation_fwd", rule=_rule, choices=CHOICES)
BACKWARD = Launch(kernel="activation_bwd", rule=_rule, choices=CHOICES, new_bits=frozenset(CHOICES))


class _Activation(Node):
    @staticmethod
    def forward(ctx, x_RF: torch.Tensor, kind: int, weight_R: torch.Tensor | None) -> torch.Tensor:
        rows = x_RF.shape[0]
        width = x_RF.shape[1] // (2 if kind == KINDS["swiglu"] else 1)
        out_RF = x_RF.new_empty(rows, width)
        launch = FORWARD.config(x_RF.device, width)
        if out_RF.numel():
            run_kernel(
                activation_fwd_kernel, (cdiv(rows, launch["ROWS"]), cdiv(width, launch["BLOCK"])),
                x_RF, weight_R, out_RF, rows, width, x_RF.stride(0),
                KIND=kind, WEIGHTED=weight_R is not None, **launch,
            )  # fmt: skip
        ctx.save_for_backward(x_RF, weight_R)
        ctx.kind = kind
        return out_RF

    @staticmethod
    def backward(ctx, dout_RF: torch.Tensor):
        x_RF, weight_R = ctx.saved_tensors
        rows, width = dout_RF.shape
        dx_RF = torch.empty_like(x_RF, memory_format=torch.contiguous_format)
        dweight_R = None if weight_R is None else x_RF.new_empty(rows, dtype=torch.float32)
        launch = BACKWARD.config(x_RF.device, width)
        if rows:
            run_kernel(
                activation_bwd_kernel, (cdiv(rows, launch["ROWS"]),),
                x_RF, weight_R, dout_RF.contiguous(), dx_RF, dweight_R, rows, width, x_RF.stride(0), dx_RF.stride(0),
                KIND=ctx.kind, WEIGHTED=weight_R is not None, **launch,
            )  # fmt: skip
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
    sources=(
        "megatron.core.ops.activation.kernels.activation",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
