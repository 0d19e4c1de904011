"""Contract of ``digest_words``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_words.definition import TILE
from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """No byte, one, whole and short last words, short and whole tiles, more tiles than slots."""
    del dtype
    out = []
    for numel, slots in ((0, 1), (1, 1), (8, 1), (8 * TILE + 3, 2), (8 * 5 * TILE - 8, 2), (8 * 3 * TILE + 36, 4)):
        raw = torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8).to(device)
        out.append(Case(name=f"n{numel}-s{slots}", args=(raw, slots)))
    return out


SPEC = OpSpec(
    name="digest_words",
    promise="digest_words(raw uint8 [n], slots) -> int64 [2, slots]: partial sums of the digest that traces hold "
    "(digest_words/definition.py); word w falls into slot w // 1024 % slots.",
    order="Wrapping sums of integers, exact in any order.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
)
