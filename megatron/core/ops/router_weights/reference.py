"""The definition of ``router_weights``."""

from __future__ import annotations

import torch

from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def router_weights(score_TE: torch.Tensor, ids_Tk: torch.Tensor, normalise: bool, factor: float | None) -> torch.Tensor:
    """Scores of the chosen experts ``[T, k]``; normalised, they are divided by their sum + 1e-20; then times
    ``factor``, if there is one. A row's ids differ."""
    weight_Tk = widen(score_TE).gather(1, ids_Tk)
    if normalise:
        weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_Tk if factor is None else weight_Tk * factor


VARIANT = Variant(
    name="reference",
    fn=router_weights,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's sum of a row; the gradient of its gather adds once to each place, because a row's ids differ.",
)
