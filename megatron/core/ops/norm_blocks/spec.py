"""Contract of ``norm_blocks``."""

from __future__ import annotations

import torch

from megatron.core.ops.norm_blocks.limbs import BLOCK
from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Nothing, short and whole last blocks, all magnitudes of fp32, denormals, infinities and NaN."""
    del dtype
    draw = Samples(generator, torch.float32, device)
    spread = draw.normal(5 * BLOCK + 77) * 10.0 ** draw.integers(5 * BLOCK + 77, low=-40, high=38)
    special = draw.normal(4 * BLOCK)
    special[BLOCK], special[3 * BLOCK - 1], special[3 * BLOCK + 9] = float("inf"), float("-inf"), float("nan")
    denormal = torch.full((3 * BLOCK,), 1e-45, device=device)
    largest = torch.full((2 * BLOCK,), torch.finfo(torch.float32).max, device=device)
    named = {"empty": draw.normal(0), "one": draw.normal(1), "short": draw.normal(BLOCK + 1), "spread": spread}
    named |= {"special": special, "denormal": denormal, "largest": largest, "zero": torch.zeros(BLOCK, device=device)}
    return [Case(name=name, args=(flat,)) for name, flat in named.items()]


SPEC = OpSpec(
    name="norm_blocks",
    promise="norm_blocks(flat fp32) -> int64 limbs (norm_blocks/limbs.py) of the exact sum of the fp64 sums of "
    "squares of 1,024-element blocks counted from the start; a short last block is filled with zeros.",
    order="In a block: fp64 squares, element i plus element i + half, halving ten times; block sums add as integers.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
    cuts=(Cut(name="blocks", level=Guarantee.LAYOUT, args={0: 0}, outs=(None,), unit=BLOCK),),
)
