"""Which samples a micro-batch holds: a pure function of consumed samples and logical coordinates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.config.errors import ConfigError, Problem

_ASKED = {
    "training": "--train-iters or --train-samples",
    "validation": "--eval-iters or evaluations (--eval-interval)",
    "test": "--eval-iters",
}
"""What says how many samples of a split are read."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The order in which a data set is read. It has no state: a resumed run asks with the consumed samples it saved.

    ``logical_data_parallel_size`` (LDP) is the logical number of shards of a step, never the physical one: any number
    of ranks reads the same global batches. Logical rank v and micro-batch m name the same samples on any layout.

    ``single`` (Megatron's): samples in index order. Micro-batch m of a step takes the ``micro_batch_size * LDP``
    samples that follow those of micro-batch m - 1; logical rank v holds the v-th piece of them.
    ``cyclic`` (Megatron's): an epoch is the largest multiple of ``micro_batch_size * LDP`` samples, reshuffled by
    torch's permutation seeded with the epoch's number: within each logical rank's own part of the data set
    (``data_sharding``), or over all of it.
    """

    total_samples: int
    micro_batch_size: int
    logical_data_parallel_size: int
    loader: Literal["single", "cyclic"] = "single"
    data_sharding: bool = True

    @property
    def stride(self) -> int:
        """Samples that all logical ranks read for one micro-batch each."""
        return self.micro_batch_size * self.logical_data_parallel_size

    def micro_batch(self, consumed_samples: int, logical_rank: int, micro_batch: int) -> NDArray[np.int64]:
        """int64 [micro_batch_size]: sample numbers of micro-batch (v, m) of the step that starts at
        ``consumed_samples``.

        Raises:
            IndexError: ``single`` and the data set ends before; ``problems`` says so beforehand.
        """
        position = consumed_samples + micro_batch * self.stride
        if self.loader == "cyclic":
            return self._cyclic(position, logical_rank)
        if position + self.stride > self.total_samples:
            raise IndexError(f"samples {position}..{position + self.stride - 1} of {self.total_samples}")
        first = position + logical_rank * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

    def problems(self, consumed_samples: int, needed_samples: int, what: str) -> list[Problem]:
        """Why ``needed_samples`` more cannot be read after ``consumed_samples``; empty where they can.

        ``what`` names the split.
        """
        if self.loader == "cyclic":
            return self._cyclic_problems(consumed_samples, what)
        if consumed_samples + needed_samples <= self.total_samples:
            return []
        return [
            Problem(
                f"{self.total_samples} {what} samples",
                f"{needed_samples} after the {consumed_samples} consumed already",
                f"more {what} data, or fewer {_ASKED.get(what, _ASKED['training'])}",
            )
        ]

    def require(self, consumed_samples: int, needed_samples: int, what: str) -> None:
        """Raise what ``problems`` finds.

        Raises:
            ConfigError: the data set is too small.
        """
        problems = self.problems(consumed_samples, needed_samples, what)
        if problems:
            raise ConfigError(problems)

    def _cyclic_problems(self, consumed_samples: int, what: str) -> list[Problem]:
        stride = f"micro-batch size * logical data-parallel size = {self.stride}"
        found = []
        if self.total_samples < self.stride:
            found.append(
                Problem(
                    f"{self.total_samples} {what} samples", f"at least {stride}", "more data, or --micro-batch-size"
                )
            )
        if consumed_samples % self.stride:
            found.append(
                Problem(
                    f"{consumed_samples} samples consumed under --dataloader-type cyclic",
                    f"a multiple of {stride}: an epoch is cut into such pieces",
                    "--micro-batch-size, or --dataloader-type single",
                )
            )
        return found

    def _cyclic(self, position: int, logical_rank: int) -> NDArray[np.int64]:
        active = self.total_samples - self.total_samples % self.stride
        epoch, within = divmod(position, active)
        assert within % self.stride == 0, "see problems"
        size, ranks = self.micro_batch_size, self.logical_data_parallel_size
        if not self.data_sharding:
            order = _permutation(self.total_samples // size * size, epoch)
            return order[within + logical_rank : within + self.stride : ranks].copy()
        bucket = active // ranks
        first = within // ranks
        return logical_rank * bucket + _permutation(bucket, epoch)[first : first + size]


@functools.lru_cache(maxsize=4)
def _permutation(size: int, epoch: int) -> NDArray[np.int64]:
    """A private generator: torch's own one, which users' code may draw from, must not move."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
