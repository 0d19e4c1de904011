"""ModelContext: what every module of a model is built with besides its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.registry import OpTable
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.topology import LogicalLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContext:
    """Where a model runs and with what.

    Attributes:
        groups: the process groups of this rank; sizes of parallelism are read from here.
        sums: the only way to add floating-point numbers of different ranks.
        ops: the implementations this run has chosen.
        seed: of initial values and of all noise.
        params_dtype: type of working weights and activations.
        sequence_parallel: cut activations along the sequence between tensor-parallel regions.
        layout: the logical layout.
    """

    groups: ProcessGroups
    sums: FloatSums
    ops: OpTable
    seed: int
    params_dtype: torch.dtype
    sequence_parallel: bool
    layout: LogicalLayout

    @property
    def cuts_sequence(self) -> bool:
        """True where a rank holds only a part of the sequence between tensor-parallel regions."""
        return self.sequence_parallel and self.groups.tp.size > 1

    def sequence_range(self, local_length: int) -> tuple[int, int, int]:
        """(start, stop, whole length) of the positions this rank holds when it holds ``local_length`` of them."""
        tp = self.groups.tp
        if not self.cuts_sequence:
            return 0, local_length, local_length
        return tp.rank * local_length, (tp.rank + 1) * local_length, tp.size * local_length
