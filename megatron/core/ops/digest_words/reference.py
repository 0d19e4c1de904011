"""The definition of ``digest_words``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_words.definition import FIRST, SECOND, TILE, mix, position_keys
from megatron.core.ops.registry import Guarantee, Variant


def digest_words(raw: torch.Tensor, slots: int) -> torch.Tensor:
    """Partial sums, int64 ``[2, slots]``, of the digest of the flat uint8 ``raw``: word w falls into slot
    ``w // TILE % slots``. The digest (definition.py) is their sum over the slots, wrapping.

    Raises:
        ValueError: the bytes do not start at a multiple of 8.
    """
    if raw.numel() and raw.data_ptr() % 8:
        raise ValueError("digest_words takes bytes that start at a multiple of 8")
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % (8 * TILE * slots)))
    mixed = mix(padded.view(torch.int64) ^ position_keys(torch.arange(padded.numel() // 8, device=raw.device)), FIRST)
    inside = (torch.arange(mixed.numel(), device=raw.device) * 8 < raw.numel()).to(torch.int64)
    by_slot = [lane.view(-1, slots, TILE).sum((0, 2)) for lane in (mixed * inside, mix(mixed, SECOND) * inside)]
    return torch.stack(by_slot)


VARIANT = Variant(
    name="reference",
    fn=digest_words,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.definition",),
)
