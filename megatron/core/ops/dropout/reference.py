"""The definition of ``dropout``."""

from __future__ import annotations

import torch

from megatron.core.ops.philox import Key, box_index, keep_mask
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def dropout(
    x: torch.Tensor, key: Key, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], p: float
) -> torch.Tensor:
    """Keep an element with probability 1 - p, scaled by 1 / (1 - p) in fp32; dropped ones are +0.0 even if not finite.

    Raises:
        ValueError: ``p`` is not in [0, 1), or ``x`` is not of the box's extent.
    """
    check(x, box, p)
    keep = keep_mask(key, box_index(shape, box, x.device), p)
    return torch.where(keep, widen(x) * (1.0 / (1.0 - p)), 0.0).to(x.dtype)


def check(x: torch.Tensor, box: tuple[tuple[int, int], ...], p: float) -> None:
    """Refuse arguments that do not fit together.

    Raises:
        ValueError: see ``dropout``.
    """
    extent = tuple(stop - start for start, stop in box)
    if tuple(x.shape) != extent or not 0.0 <= p < 1.0:
        raise ValueError(f"dropout of {tuple(x.shape)} as a box of {extent} with p {p}")


VARIANT = Variant(
    name="reference",
    fn=dropout,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise; the mask comes from integer arithmetic on global indices.",
    sources=("megatron.core.ops.philox",),
)
