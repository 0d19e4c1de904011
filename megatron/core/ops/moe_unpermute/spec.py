"""Contract of ``moe_unpermute``."""

from __future__ import annotations

import torch

from megatron.core.ops.moe_permute.spec import SIZES, row_map
from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Absent copies, rows nobody reads, no tokens, no rows, terms that cancel."""
    draw = Samples(generator, dtype, device)
    out = []
    for tokens, copies, width, spare in SIZES:
        row_of_TJ, num_rows = row_map(draw, tokens, copies, spare)
        args = (draw.normal(num_rows, width), row_of_TJ)
        out.append(Case(name=f"T{tokens}-J{copies}-H{width}-{spare}", args=args, grads=(0,)))
    nowhere = torch.full((4, 2), -1, dtype=torch.int64, device=device)
    out.append(Case(name="no-rows", args=(draw.normal(0, 6), nowhere), grads=(0,)))
    cancelling = (
        torch.tensor([1e8, 1.0, -1e8, -0.0, -0.0, 3.0, 1e8], device=device).to(dtype).repeat(5, 1).T.contiguous()
    )
    chosen = torch.tensor([[0, 1, 2], [3, 4, -1], [-1, 5, -1], [-1, -1, 6]], device=device)
    out.append(Case(name="cancelling", args=(cancelling, chosen), grads=(0,)))
    return out


SPEC = OpSpec(
    name="moe_unpermute",
    promise="moe_unpermute(rows_RH, row_of_TJ int64) -> x_TH: the sum over j of rows[row_of[t, j]]; -1 is skipped.",
    order="Starts from +0.0 and adds over j ascending in fp32, rounding once. Backward copies; unread rows get 0.",
    cases=cases,
    tolerance=tolerances(2e-6, 1e-2, "up to 6 terms in fp32 that may cancel"),
    exact=True,
    cuts=(
        Cut(name="tokens", level=Guarantee.BATCH, args={1: 0}),
        Cut(name="width", level=Guarantee.LAYOUT, args={0: 1}, outs=(1,)),
    ),
)
