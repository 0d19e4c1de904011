"""RMSNorm and LayerNorm as modules of their own; most layers use the form fused into their first projection."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.norm import Normalizer


class Norm(torch.nn.Module):
    """Norm over the last dimension, by default the hidden one, with weight ``<name>.weight`` (and ``<name>.bias`` for
    LayerNorm).

    Every tensor-parallel rank holds the same weight; under sequence parallelism its gradient is partial. ``per_head``
    and ``decay`` as in ``Normalizer.create``.
    """

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        context: ModelContext,
        *,
        size: int | None = None,
        per_head: bool = False,
        decay: bool = False,
    ) -> None:
        super().__init__()
        self._normalize = Normalizer(config, context)
        self.weight, self.bias = self._normalize.create(
            f"{name}.", size or config.hidden_size, context, per_head=per_head, decay=decay
        )

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Normalised input in the activation type."""
        return self._normalize(x_SBH, self.weight, self.bias)
