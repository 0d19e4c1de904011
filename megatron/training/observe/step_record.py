"""What one training step showed, as plain numbers that every rank agrees on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

EvalSplit = Literal["valid", "test"]
"""The data of an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step.

    ``losses`` maps Megatron's names (``lm loss``, ``load_balancing_loss``, ...) to means over the global batch.
    ``learning_rate`` and ``weight_decay`` are those the step used, ``elapsed_s`` is its wall time.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    num_tokens: int
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    weight_decay: float = 0.0
    num_zeros: int | None = None
    params_norm: float | None = None
    elapsed_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Fields by name; ``None`` where a quantity was not asked for."""
        return dataclasses.asdict(self)
