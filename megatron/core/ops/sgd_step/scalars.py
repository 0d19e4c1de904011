"""The numbers of one SGD step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDScalars:
    """What all elements of a piece share.

    Attributes:
        lr: learning rate of the step.
        momentum: what the running update keeps of itself.
        weight_decay: added to the gradient, times the parameter; 0 for parameters that do not decay.
        clip_factor: multiplies the gradient before anything else.
    """

    lr: float
    momentum: float
    weight_decay: float
    clip_factor: float = 1.0
