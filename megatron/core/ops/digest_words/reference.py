"""The definition of ``digest_words``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.digest_words.definition import GROUP, LOW, TILE, place_keys, tile_keys
from megatron.core.ops.registry import Guarantee, Variant


def digest_words(tensors: Sequence[torch.Tensor], slots: Sequence[int], out: torch.Tensor, first: int) -> None:
    """Partial sums of the digest (definition.py) of each contiguous tensor: ``slots[i]`` columns of ``out``, int64
    ``[2, n]``, for tensor i, one tensor after the other, from column ``first`` on. Tile t falls into slot
    ``t // GROUP % slots[i]``; the digest is the sum over the slots, wrapping.

    Raises:
        ValueError: a tensor is not contiguous, or does not start at a multiple of 4 bytes.
    """
    for tensor, count in zip(tensors, slots, strict=True):
        check(tensor)
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % (4 * TILE * GROUP * count)))
        words = (padded.view(torch.int32).to(torch.int64) & LOW).view(-1, TILE)
        places, tiles = (torch.arange(n, device=raw.device) for n in (TILE, words.shape[0]))
        for lane, (place, tile) in enumerate(zip(place_keys(places), tile_keys(tiles), strict=True)):
            by_tile = (words * tile.unsqueeze(1) * place).sum(1)
            out[lane, first : first + count] = by_tile.view(-1, count, GROUP).sum((0, 2))
        first += count


def check(tensor: torch.Tensor) -> None:
    """Whether its bytes can be read as they lie.

    Raises:
        ValueError: they cannot.
    """
    if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() % 4):
        raise ValueError("digest_words takes contiguous tensors that start at a multiple of 4 bytes")


VARIANT = Variant(
    name="reference",
    fn=digest_words,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.definition",),
)
