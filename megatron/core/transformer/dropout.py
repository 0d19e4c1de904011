"""Dropout whose mask is a function of logical coordinates and global positions, never of a generator's state."""

from __future__ import annotations

import torch

from megatron.core.contracts.batch import Microbatch
from megatron.core.rng.counter import Key, key_of
from megatron.core.tensor_parallel.context import ModelContext


def noise_key(context: ModelContext, kind: str, microbatch: Microbatch, layer: int, site: str) -> Key:
    """Key of one noise source: what it is, in which logical micro-batch of which iteration, in which layer, where."""
    place = (microbatch.iteration, microbatch.shard, microbatch.index)
    return key_of(context.seed, kind, *place, layer, site, microbatch.application)


class ResidualDropout:
    """Dropout on the residual stream's form ``[S, B, H]`` (this rank's positions under sequence parallelism).

    ``layer`` is the global layer number, ``site`` tells sources in one layer apart. Does nothing outside training.
    """

    def __init__(self, probability: float, context: ModelContext, layer: int, site: str) -> None:
        self.probability, self.context, self.layer, self.site = probability, context, layer, site
        self._op = context.ops["dropout"]

    def __call__(self, x_SBH: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """Zero with the given probability, scale the rest by 1 / (1 - probability)."""
        if self.probability == 0.0 or not microbatch.training:
            return x_SBH
        start, stop, whole = self.context.sequence_range(x_SBH.shape[0])
        batch, hidden = x_SBH.shape[1:]
        key = noise_key(self.context, "dropout", microbatch, self.layer, self.site)
        box = ((start, stop), (0, batch), (0, hidden))
        return self._op(x_SBH, key, (whole, batch, hidden), box, self.probability)
