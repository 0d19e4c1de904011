"""Launches of the permutation kernels; both directions serve ``moe_permute`` and ``moe_unpermute``."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.moe_permute.kernels.row_copies import (
    clear_rest_kernel,
    gather_sum_kernel,
    scatter_copy_kernel,
)

SOURCES = (
    "megatron.core.ops.moe_permute.row_copies",
    "megatron.core.ops.moe_permute.kernels.row_copies",
    "megatron.core.ops.direct_launch",
    "megatron.core.ops.launch",
)


def _copy_rule(width: int) -> Config:
    """Pieces of 1,024 elements; of shorter rows, as many tokens as make that."""
    block = min(1024, power_of_two(width))
    return {"TOKENS": 1024 // block, "BLOCK": block, "num_warps": 4}


def _sum_rule(width: int) -> Config:
    """Pieces of 4,096 elements, 512 to a warp; of shorter rows, as many tokens as make 1,024."""
    block = min(4096, power_of_two(width))
    return {"TOKENS": max(1, 1024 // block), "BLOCK": block, "num_warps": max(2, block // 512)}


CHOICES = {"BLOCK": (512, 1024, 2048, 4096), "TOKENS": (1, 2, 4), "num_warps": (1, 2, 4, 8)}
COPY = Launch(kernel="scatter_copy", rule=_copy_rule, choices=CHOICES)
SUM = Launch(kernel="gather_sum", rule=_sum_rule, choices=CHOICES)
CLEAR = Launch(
    kernel="clear_rest",
    rule=lambda _: {"ROWS": 32, "BLOCK": 128, "num_warps": 4},
    choices={"ROWS": (16, 32, 64, 128, 256), "BLOCK": (64, 128, 256), "num_warps": (1, 2, 4)},
)


def tokens_to_rows(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``rows[row_of[t, j]] = x[t]``; rows that no entry names are zero. ``row_of_TJ`` is contiguous."""
    (tokens, copies), width, device = row_of_TJ.shape, x_TH.shape[1], x_TH.device
    filled_R = torch.zeros(num_rows, dtype=torch.int8, device=device)
    rows_RH = x_TH.new_empty(num_rows, width)
    if not rows_RH.numel():
        return rows_RH
    if row_of_TJ.numel():
        launch = COPY.config(device, width)
        run_kernel(
            scatter_copy_kernel, (cdiv(tokens, launch["TOKENS"]), cdiv(width, launch["BLOCK"])),
            x_TH, row_of_TJ, rows_RH, filled_R, tokens, width, x_TH.stride(0),
            COPIES=copies, **launch,
        )  # fmt: skip
    launch = CLEAR.config(device, width)
    run_kernel(clear_rest_kernel, (cdiv(num_rows, launch["ROWS"]),), filled_R, rows_RH, num_rows, width, **launch)
    return rows_RH


def rows_to_tokens(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """``x[t] = sum over j of rows[row_of[t, j]]`` in fp32, j ascending from +0.0, rounded once."""
    (tokens, copies), width = row_of_TJ.shape, rows_RH.shape[1]
    x_TH = rows_RH.new_empty(tokens, width)
    if x_TH.numel():
        launch = SUM.config(rows_RH.device, width)
        run_kernel(
            gather_sum_kernel, (cdiv(tokens, launch["TOKENS"]), cdiv(width, launch["BLOCK"])),
            rows_RH, row_of_TJ, x_TH, tokens, width, rows_RH.stride(0),
            COPIES=copies, **launch,
        )  # fmt: skip
    return x_TH
