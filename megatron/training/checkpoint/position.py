"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Steps taken, and samples consumed of the training and of the validation data."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
