"""Contract of ``digest_rows``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Rows of one word and of many, one row, none, short last runs, parts that stay empty."""
    del dtype
    out = []
    for rows, width, length, splits in ((0, 3, 1, 1), (1, 1, 1, 1), (70, 5, 5, 2), (333, 1, 21, 4), (40, 700, 3, 4)):
        words = torch.randint(-(1 << 62), 1 << 62, (rows, width), generator=generator).to(device)
        out.append(Case(name=f"R{rows}-K{width}-L{length}-s{splits}", args=(words, length, splits)))
    return out


SPEC = OpSpec(
    name="digest_rows",
    promise="digest_rows(words int64 [R, K], length, splits) -> int64 [2, runs * splits]: partial sums of the digests "
    "by row that traces hold, without and with the rows' order, for runs of `length` rows in `splits` parts.",
    order="Wrapping sums of integers, exact in any order.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
)
