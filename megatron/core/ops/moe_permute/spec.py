"""Contract of ``moe_permute``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

SIZES = ((13, 3, 9, 4), (1, 1, 5, 0), (0, 2, 4, 3), (40, 6, 33, 0), (7, 4, 1, 2), (1100, 1, 1, 40), (5, 3, 1030, 70))
"""Tokens, copies, width, rows that no token fills."""


def row_map(draw: Samples, tokens: int, copies: int, spare: int) -> tuple[torch.Tensor, int]:
    """A random map ``row_of_TJ`` with a third of its entries absent (-1), and the number of rows."""
    present = draw.keep(tokens, copies, share=0.67)
    rows = draw.order(tokens * copies + spare)
    row_of_TJ = rows[: tokens * copies].view(tokens, copies)
    return torch.where(present, row_of_TJ, -1), rows.numel()


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Absent copies, unfilled rows, no tokens, tokens without any row."""
    draw = Samples(generator, dtype, device)
    out = []
    for tokens, copies, width, spare in SIZES:
        row_of_TJ, num_rows = row_map(draw, tokens, copies, spare)
        args = (draw.normal(tokens, width), row_of_TJ, num_rows)
        out.append(Case(name=f"T{tokens}-J{copies}-H{width}-{spare}", args=args, grads=(0,)))
    nowhere = torch.full((4, 2), -1, dtype=torch.int64, device=device)
    out.append(Case(name="nowhere", args=(draw.normal(4, 6), nowhere, 3), grads=(0,)))
    return out


SPEC = OpSpec(
    name="moe_permute",
    promise="moe_permute(x_TH, row_of_TJ int64, num_rows) -> rows_RH with rows[row_of[t, j]] = x[t]; other rows are 0.",
    order="Forward copies. Backward starts from +0.0 and adds a token's rows over j ascending in fp32, rounding once.",
    cases=cases,
    tolerance=tolerances(2e-6, 1e-2, "copies; gradients add up to 6 terms in fp32"),
    exact=True,
    cuts=(Cut(name="width", level=Guarantee.LAYOUT, args={0: 1}, outs=(1,)),),
)
