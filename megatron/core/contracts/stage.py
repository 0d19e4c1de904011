"""What the engine may ask of a piece of a model that lives on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.contracts.parameter import ModelParameter


class BalancedRouter(Protocol):
    """A router whose expert bias follows exact token counts.

    ``expert_bias_E`` is fp32; ``token_counts_E`` is int64, counts this rank's tokens of the step's training forward
    passes, and is zeroed by the engine once it has moved the bias. ``name`` is global.
    """

    name: str
    expert_bias_E: torch.Tensor
    token_counts_E: torch.Tensor
    bias_update_rate: float


class Stage(Protocol):
    """One chunk of consecutive layers. The pipeline executor sees nothing else of a model."""

    is_first: bool
    is_last: bool

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        """Run the chunk.

        ``activation`` is the previous chunk's output (``None`` on the first). Returns the output to send on, of
        ``boundary_shape``; on the last chunk the fp32 scalar to differentiate: sum of masked token losses / valid
        tokens / number of micro-batches.
        """
        ...

    def boundary_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        """Shape of the activation between chunks on this rank."""
        ...

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Type of the activation between chunks."""
        ...

    def model_parameters(self) -> Iterator[ModelParameter]:
        """The chunk's parameters in registration order."""
        ...

    def balanced_routers(self) -> Iterator[BalancedRouter]:
        """The chunk's routers that have an expert bias, in layer order."""
        ...
