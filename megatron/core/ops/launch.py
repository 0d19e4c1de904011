"""Launch configurations of row-wise Triton kernels: a committed table and, for shapes without a row, a stated rule.

Nothing is timed at run time. A shape class is the row width rounded up to a power of two. Tuned rows were measured on
one H200; the rule is: a tile holds whole rows and at least 2,048 elements, 16 elements to a thread, 1 to 8 warps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

TILE = 2048
ELEMENTS_PER_THREAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """``rows`` rows of ``block`` elements make the tile of one program."""

    block: int
    rows: int
    num_warps: int


TABLE: Mapping[tuple[str, int], Launch] = {
    ("gated_rms_norm_bwd", 512): Launch(block=512, rows=2, num_warps=4),
    # One tile of 8 warps for the widest rows keeps a row in registers.
    ("rms_norm_bwd", 8192): Launch(block=8192, rows=1, num_warps=16),
    ("rms_norm_bwd", 16384): Launch(block=16384, rows=1, num_warps=16),
}


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def row_launch(op: str, width: int) -> Launch:
    """The configuration of ``op`` for rows of ``width`` elements: its row of the table, or the rule."""
    block = power_of_two(width)
    if (op, block) in TABLE:
        return TABLE[op, block]
    rows = max(1, TILE // block)
    warps = power_of_two(block * rows // (32 * ELEMENTS_PER_THREAD))
    return Launch(block=block, rows=rows, num_warps=min(8, max(1, warps)))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the matrix of its last dimension's rows, elements of a row adjacent; copied only where it has to be."""
    x_RX = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return x_RX if x_RX.stride(-1) == 1 else x_RX.contiguous()
