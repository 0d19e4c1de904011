"""Launches of the permutation kernels; both directions serve ``moe_permute`` and ``moe_unpermute``."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.launch import power_of_two
from megatron.core.ops.moe_permute.kernels.row_copies import gather_copy_kernel, gather_sum_kernel, invert_map_kernel

MAX_BLOCK = 4096
"""Longest piece of a row that one program moves."""
INVERT_BLOCK = 1024

SOURCES = (
    "megatron.core.ops.moe_permute.row_copies",
    "megatron.core.ops.moe_permute.kernels.row_copies",
    "megatron.core.ops.launch",
)


def _pieces(width: int) -> tuple[int, int, int]:
    block = min(MAX_BLOCK, power_of_two(width))
    return triton.cdiv(width, block), block, min(8, max(1, block // 512))


def tokens_to_rows(x_TH: torch.Tensor, row_of_TJ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``rows[row_of[t, j]] = x[t]``; rows that no entry names are zero. ``row_of_TJ`` is contiguous."""
    entries, copies, width = row_of_TJ.numel(), row_of_TJ.shape[1], x_TH.shape[1]
    token_of_R = torch.full((num_rows,), -1, dtype=torch.int32, device=x_TH.device)
    rows_RH = torch.empty(num_rows, width, dtype=x_TH.dtype, device=x_TH.device)
    if entries and num_rows:
        invert_map_kernel[(triton.cdiv(entries, INVERT_BLOCK),)](
            row_of_ptr=row_of_TJ,
            token_of_ptr=token_of_R,
            entries=entries,
            copies=copies,
            BLOCK=INVERT_BLOCK,
            num_warps=4,
        )
    if rows_RH.numel():
        pieces, block, warps = _pieces(width)
        gather_copy_kernel[(num_rows, pieces)](
            x_ptr=x_TH,
            token_of_ptr=token_of_R,
            rows_ptr=rows_RH,
            width=width,
            x_stride=x_TH.stride(0),
            BLOCK=block,
            num_warps=warps,
        )
    return rows_RH


def rows_to_tokens(rows_RH: torch.Tensor, row_of_TJ: torch.Tensor) -> torch.Tensor:
    """``x[t] = sum over j of rows[row_of[t, j]]`` in fp32, j ascending from +0.0, rounded once."""
    (tokens, copies), width = row_of_TJ.shape, rows_RH.shape[1]
    x_TH = torch.empty(tokens, width, dtype=rows_RH.dtype, device=rows_RH.device)
    if x_TH.numel():
        pieces, block, warps = _pieces(width)
        gather_sum_kernel[(tokens, pieces)](
            rows_ptr=rows_RH,
            row_of_ptr=row_of_TJ,
            x_ptr=x_TH,
            copies=copies,
            width=width,
            rows_stride=rows_RH.stride(0),
            BLOCK=block,
            num_warps=warps,
        )
    return x_TH
