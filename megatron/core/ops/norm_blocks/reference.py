"""The definition of ``norm_blocks``."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from megatron.core.ops.norm_blocks.limbs import BLOCK, LIMBS, UNIT_EXPONENT
from megatron.core.ops.registry import Guarantee, Variant

_LOW = 0xFFFFFFFF
_AT_ONCE = 1 << 14


def block_sums(flat: torch.Tensor) -> torch.Tensor:
    """fp64 sums of squares of blocks of 1,024 elements, by halving: the same bits for any number of blocks."""
    part = pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK).double().square()
    while part.shape[1] > 1:
        half = part.shape[1] // 2
        part = part[:, :half] + part[:, half:]
    return part.squeeze(1)


def spread(sums: torch.Tensor) -> torch.Tensor:
    """Limbs and flags of the exact sum of at most ``_AT_ONCE`` block sums."""
    raw = sums.view(torch.int64)
    exponent = (raw >> 52) & 0x7FF
    # Block sums of fp32 squares are zero or far above fp64's denormals.
    finite = (exponent > 0) & (exponent < 0x7FF)
    mantissa = torch.where(finite, (raw & ((1 << 52) - 1)) | (1 << 52), 0)
    position = torch.where(finite, exponent - 1075 - UNIT_EXPONENT, 0)
    limb, shift = position >> 5, position & 31
    low, high = (mantissa & _LOW) << shift, (mantissa >> 32) << shift
    words = torch.stack((low & _LOW, ((low >> 32) & _LOW) + (high & _LOW), high >> 32), dim=1)
    at = limb.unsqueeze(1) + torch.arange(3, device=sums.device)
    where = at.unsqueeze(2) == torch.arange(LIMBS, device=sums.device)
    total = torch.where(where, words.unsqueeze(2), 0).sum(dim=(0, 1))
    return torch.cat((total, sums.isinf().sum().view(1), sums.isnan().sum().view(1)))


def norm_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Exact accumulator (int64 ``[SIZE]``) of the squares of a flat fp32 tensor.

    Raises:
        ValueError: ``flat`` is not a flat fp32 or fp64 tensor (fp64 holding fp32 values).
    """
    if flat.dim() != 1 or flat.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"norm_blocks of {flat.dtype}{tuple(flat.shape)}")
    pieces = [spread(block_sums(piece)) for piece in flat.detach().split(_AT_ONCE * BLOCK)]
    return torch.stack(pieces).sum(dim=0)


VARIANT = Variant(
    name="reference",
    fn=norm_blocks,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="A fixed tree inside each block, exact integer sums of the blocks.",
    sources=("megatron.core.ops.norm_blocks.limbs",),
)
