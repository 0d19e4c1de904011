"""The numbers of one AdamW step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamScalars:
    """What all elements of a piece share.

    Attributes:
        lr: learning rate of the step.
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; 0 for parameters that do not decay.
        step: number of this step, from 1.
        clip_factor: multiplies the gradient before anything else.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    clip_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"steps count from 1, not {self.step}")

    @property
    def decay(self) -> float:
        """What the parameter is multiplied by before the update."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Learning rate over the first moment's bias correction."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Root of the second moment's bias correction."""
        return float((1.0 - self.beta2**self.step) ** 0.5)
