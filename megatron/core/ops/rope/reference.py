"""The definition of ``rope``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def rope(x_SBND: torch.Tensor, angle_SBR: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (r, R + r) of the head width by ``angle_SBR`` (Su et al., arXiv 2104.09864); the rest is copied."""
    half = angle_SBR.shape[-1]
    angle = widen(angle_SBR).contiguous().unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x_SBND.split((half, half, x_SBND.shape[-1] - 2 * half), dim=-1)
    first, second = widen(first), widen(second)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x_SBND.dtype), rest), dim=-1)


VARIANT = Variant(
    name="reference",
    fn=rope,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise.",
)
