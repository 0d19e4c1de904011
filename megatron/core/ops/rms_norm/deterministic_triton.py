"""``rms_norm`` as one Triton kernel each way, and a two-stage sum for the weight's gradient."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.column_sum import column_sum
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, rows_in_pieces, rows_of
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.rms_norm.kernels.rms_norm import rms_norm_bwd_kernel, rms_norm_fwd_kernel

STAGED_BYTES = 48 * 1024
"""Two tiles of x and two of dy are in shared memory with three stages; wider rows go without."""


def _rule(width: int, *_: int) -> Config:
    return rows_in_pieces(width, least=1024, most=3)


def _backward_rule(width: int, element_size: int) -> Config:
    """PROGRAMS, at most: each leaves one partial row of the weight's gradient.

    Of 4, 8 or more warps 3, 2 or 1 fit on each of 132 multiprocessors; other GPUs have the same number.
    """
    rule = _rule(width)
    tile = rule["ROWS"] * rule["PIECE"] * cdiv(width, rule["PIECE"]) * element_size
    programs = 132 * max(1, min(3, 16 // rule["num_warps"]))
    return {**rule, "STAGES": 3 if tile <= STAGED_BYTES else 1, "PROGRAMS": programs}


CHOICES = {"ROWS": (1, 2, 4, 8), "PIECE": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8, 16)}
FORWARD = Launch(kernel="rms_norm_fwd", rule=_rule, choices=CHOICES, new_bits=frozenset(CHOICES))
BACKWARD = Launch(
    kernel="rms_norm_bwd",
    rule=_backward_rule,
    choices={**CHOICES, "STAGES": (1, 2, 3, 4), "PROGRAMS": (132, 264, 396, 528)},
    new_bits=frozenset({*CHOICES, "PROGRAMS"}),
)
"""By width and element size; never by the number of rows."""


class _RMSNorm(Node):
    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x_TH.shape
        y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        rstd_T = x_TH.new_empty(rows, dtype=torch.float32)
        launch = FORWARD.config(x_TH.device, width, x_TH.element_size())
        if rows:
            run_kernel(
                rms_norm_fwd_kernel, (cdiv(rows, launch["ROWS"]),),
                x_TH, weight_H, y_TH, rstd_T, rows, width, x_TH.stride(0), eps,
                PIECES=cdiv(width, launch["PIECE"]), **launch,
            )  # fmt: skip
        ctx.save_for_backward(x_TH, weight_H, rstd_T)
        return y_TH

    @staticmethod
    def backward(ctx, dy_TH: torch.Tensor):
        x_TH, weight_H, rstd_T = ctx.saved_tensors
        rows, width = x_TH.shape
        launch = BACKWARD.config(x_TH.device, width, x_TH.element_size())
        tiles = cdiv(cdiv(rows, launch["ROWS"]), launch["PROGRAMS"])
        programs = cdiv(rows, launch["ROWS"] * tiles) if rows else 0
        dx_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        parts_PH = x_TH.new_empty(programs, width, dtype=torch.float32)
        if programs:
            run_kernel(
                rms_norm_bwd_kernel, (programs,),
                x_TH, weight_H, dy_TH.contiguous(), rstd_T, dx_TH, parts_PH, rows, width, x_TH.stride(0), tiles,
                ROWS=launch["ROWS"], PIECE=launch["PIECE"], PIECES=cdiv(width, launch["PIECE"]),
                STAGES=launch["STAGES"], num_warps=launch["num_warps"],
            )  # fmt: skip
        return dx_TH, column_sum(parts_PH).to(weight_H.dtype), None


def rms_norm(x_SBH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Same contract as the reference; rows of a wider matrix are read in place."""
    return _RMSNorm.apply(rows_of(x_SBH), weight_H.contiguous(), eps).view(x_SBH.shape)


VARIANT = Variant(
    name="deterministic_triton",
    fn=rms_norm,
    guarantee={"cuda": Guarantee.BATCH},
    why="Fixed trees inside rows; partial weight gradients of a fixed split of the rows, added in program order.",
    sources=(
        "megatron.core.ops.rms_norm.kernels.rms_norm",
        "megatron.core.ops.column_sum",
        "megatron.core.ops.device_functions",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
