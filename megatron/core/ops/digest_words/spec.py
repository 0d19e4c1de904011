"""Contract of ``digest_words``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_words.definition import GROUP, TILE
from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import tolerances

_BYTES = 4 * TILE
SIZES = (
    ((0, 1),),
    ((1, 1),),
    ((4, 1), (3, 1), (2 * _BYTES + 3, 2)),
    ((5 * _BYTES - 4, 2), (0, 1), (GROUP * _BYTES, 1), (_BYTES, 1), (9 * GROUP * _BYTES + 35, 4)),
)
"""Bytes and slots of each tensor of a case."""


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """No byte, one, whole and short last words, tiles and groups, more groups than slots; several tensors, more than
    one launch takes; one that starts between two multiples of 16."""
    del dtype

    def draw(numel: int) -> torch.Tensor:
        return torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8).to(device)

    out = []
    for number, sizes in enumerate(SIZES):
        tensors, slots = [draw(numel) for numel, _ in sizes], [count for _, count in sizes]
        out.append(_case(f"tensors{number}", tensors, slots))
    words = draw(4 * 8 * TILE + 8).view(torch.int32)
    return [*out, _case("shifted", [words[1:], words[:-1].view(torch.bfloat16)], [2, 1])]


def _case(name: str, tensors: list[torch.Tensor], slots: list[int]) -> Case:
    out = torch.zeros(2, sum(slots) + 3, dtype=torch.int64, device=tensors[0].device)
    return Case(name=name, args=(tensors, slots, out, 2), writes=(2,))


SPEC = OpSpec(
    name="digest_words",
    promise="digest_words(tensors, slots, out int64 [2, n], first): partial sums of the digest that traces hold "
    "(digest_words/definition.py) of each tensor, slots[i] columns of out for tensor i, from column first on.",
    order="Wrapping sums of integers, exact in any order.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
)
