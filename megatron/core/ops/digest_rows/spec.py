"""Contract of ``digest_rows``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import tolerances

SIZES = ((0, 3, 1, 1), (1, 1, 1, 1), (70, 5, 5, 2), (333, 1, 21, 4), (90, 8, 6, 1), (40, 700, 3, 4), (9, 1025, 2, 2))
"""Rows, words in a row, rows in a run, parts of a run."""


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Rows of one word and of many, one row, none, short last runs, parts that stay empty."""
    del dtype
    out = []
    for rows, width, length, splits in SIZES:
        words = torch.randint(-(1 << 31), 1 << 31, (rows, width), generator=generator).to(torch.int32).to(device)
        lines = torch.zeros(2, -(-rows // length) * splits + 3, dtype=torch.int64, device=device)
        name = f"R{rows}-K{width}-L{length}-s{splits}"
        out.append(Case(name=name, args=(words, length, splits, lines, 2), writes=(3,)))
    return out


SPEC = OpSpec(
    name="digest_rows",
    promise="digest_rows(words int32 [R, K], length, splits, out int64 [2, n], first): partial sums of the digests by "
    "row that traces hold, without and with the rows' order, for runs of `length` rows in `splits` parts; in out from "
    "column first on.",
    order="Wrapping sums of integers, exact in any order.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
)
