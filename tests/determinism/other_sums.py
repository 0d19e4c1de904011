"""Sums that break the contract, each in one way; controls train with them and must be seen to differ."""

from __future__ import annotations

import torch

from megatron.core.process_groups.collectives import Waiting, nothing_to_wait_for
from megatron.core.process_groups.groups import Group
from megatron.core.process_groups.ordered_reduce import FoldInto, NativeSums, OrderedSums
from megatron.core.process_groups.running_fold import RunningFold


class RestartingSums(OrderedSums):
    """Every pass folds its own members from the start, instead of going on with the block that is open."""

    def __init__(self, fold: FoldInto) -> None:
        super().__init__(fold)
        self._plain = fold

    def start_fold(self, group: Group, members: int, block: int) -> RunningFold:
        """One term per pass."""
        passes = members // group.size
        return RunningFold(passes, passes, self._plain)

    def reduce_scatter_part(self, group: Group, flat: torch.Tensor, running: RunningFold) -> Waiting:
        """The pass, folded by itself."""
        running.add(self.reduce_scatter(group, flat).unsqueeze(0))
        return nothing_to_wait_for

    def reduce_scatter(self, group: Group, flat: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter``."""
        whole = RunningFold(group.size, block or group.size, self._plain)
        super().reduce_scatter_part(group, flat, whole)()
        return whole.result()


def shuffled_sums(fold: FoldInto) -> OrderedSums:
    """Members are added as a ring that starts at the second and goes the other way would add them."""
    return OrderedSums(lambda slots, block, *out: fold(slots.flip(0).roll(1, dims=0), block, *out))


def native_sums(fold: FoldInto) -> NativeSums:
    """Sums are left to the backend."""
    return NativeSums()


OTHER_SUMS = {"restarting": RestartingSums, "shuffled": shuffled_sums, "native": native_sums}
