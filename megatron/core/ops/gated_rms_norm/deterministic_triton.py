"""``gated_rms_norm`` as one Triton kernel each way, and a two-stage sum for the weight's gradient."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.column_sum import column_sum
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.gated_rms_norm.kernels.gated_rms_norm import (
    gated_rms_norm_bwd_kernel,
    gated_rms_norm_fwd_kernel,
)
from megatron.core.ops.launch import Config, Launch, cdiv, rows_in_pieces, rows_of
from megatron.core.ops.registry import Guarantee, Variant


def _forward_rule(width: int, *_: int) -> Config:
    """As many warps to a row as in the backward, and rows for at least two warps."""
    rule = rows_in_pieces(width, least=256, most=2)
    times = 2 if rule["num_warps"] == 1 else 1
    return {**rule, "ROWS": times * rule["ROWS"], "num_warps": times * rule["num_warps"]}


def _backward_rule(width: int, *_: int) -> Config:
    """PROGRAMS to a group, at most: each leaves one partial row of the weight's gradient.

    One warp of each of eight groups is 12 on each of 132 multiprocessors; other GPUs and groups have the same number.
    """
    rule = rows_in_pieces(width, least=256, most=2)
    return {**rule, "PROGRAMS": 198 if rule["num_warps"] < 4 else 264}


CHOICES = {"ROWS": (1, 2, 4, 8), "PIECE": (256, 512, 1024), "num_warps": (1, 2, 4, 8)}
FORWARD = Launch(kernel="gated_rms_norm_fwd", rule=_forward_rule, choices=CHOICES, new_bits=frozenset(CHOICES))
BACKWARD = Launch(
    kernel="gated_rms_norm_bwd",
    rule=_backward_rule,
    choices={**CHOICES, "PROGRAMS": (132, 198, 264, 396)},
    new_bits=frozenset({*CHOICES, "PROGRAMS"}),
)
"""By group size and element size; never by the number of rows."""


class _GatedRMSNorm(Node):
    @staticmethod
    def forward(ctx, y_TX: torch.Tensor, z_TX: torch.Tensor, weight_X: torch.Tensor, group_size: int, eps: float):
        rows, width = y_TX.shape
        groups = width // group_size
        out_TX = y_TX.new_empty(rows, width)
        rstd_TG = y_TX.new_empty(rows, groups, dtype=torch.float32)
        launch = FORWARD.config(y_TX.device, group_size, y_TX.element_size())
        if out_TX.numel():
            run_kernel(
                gated_rms_norm_fwd_kernel, (cdiv(rows, launch["ROWS"]), groups),
                y_TX, z_TX, weight_X, out_TX, rstd_TG, rows, width, group_size, y_TX.stride(0), z_TX.stride(0), eps,
                PIECES=cdiv(group_size, launch["PIECE"]), **launch,
            )  # fmt: skip
        ctx.save_for_backward(y_TX, z_TX, weight_X, rstd_TG)
        return out_TX

    @staticmethod
    def backward(ctx, dout_TX: torch.Tensor):
        y_TX, z_TX, weight_X, rstd_TG = ctx.saved_tensors
        (rows, width), groups = y_TX.shape, rstd_TG.shape[1]
        group_size = width // max(1, groups)
        launch = BACKWARD.config(y_TX.device, group_size, y_TX.element_size())
        tiles = cdiv(cdiv(rows, launch["ROWS"]), launch["PROGRAMS"])
        programs = cdiv(rows, launch["ROWS"] * tiles) if rows else 0
        dy_TX = y_TX.new_empty(rows, width)
        dz_TX = torch.empty_like(dy_TX)
        parts_PX = y_TX.new_empty(programs, width, dtype=torch.float32)
        if dy_TX.numel():
            run_kernel(
                gated_rms_norm_bwd_kernel, (programs, groups),
                y_TX, z_TX, weight_X, dout_TX.contiguous(), rstd_TG, dy_TX, dz_TX, parts_PX,
                rows, width, group_size, y_TX.stride(0), z_TX.stride(0), tiles,
                ROWS=launch["ROWS"], PIECE=launch["PIECE"], PIECES=cdiv(group_size, launch["PIECE"]),
                num_warps=launch["num_warps"],
            )  # fmt: skip
        return dy_TX, dz_TX, column_sum(parts_PX).to(weight_X.dtype), None, None


def gated_rms_norm(
    y_BSX: torch.Tensor, z_BSX: torch.Tensor, weight_X: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    """Same contract as the reference; slices of a wider projection are read in place."""
    out_TX = _GatedRMSNorm.apply(rows_of(y_BSX), rows_of(z_BSX), weight_X.contiguous(), group_size, eps)
    return out_TX.view(y_BSX.shape)


VARIANT = Variant(
    name="deterministic_triton",
    fn=gated_rms_norm,
    guarantee={"cuda": Guarantee.BATCH},
    why="Fixed trees inside groups; partial weight gradients of a fixed split of the rows, added in program order.",
    sources=(
        "megatron.core.ops.gated_rms_norm.kernels.gated_rms_norm",
        "megatron.core.ops.column_sum",
        "megatron.core.ops.device_functions",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
