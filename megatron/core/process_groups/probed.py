"""Process groups and sums that tell a probe what travels; built only for a run that is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.process_groups.collectives import Waiting, nothing_to_wait_for
from megatron.core.process_groups.groups import Group, ProcessGroups
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.running_fold import RunningFold
from megatron.core.trace.probe import BothProbes, Probe


def probe_groups(groups: ProcessGroups, probe: Probe) -> ProcessGroups:
    """The same groups, each with the probe."""
    return _with_probe(groups, probe)


def _with_probe(value: Any, probe: Probe) -> Any:
    """A copy in which every group has the probe, wherever it lies, besides one that it has already."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    if isinstance(value, Group) and value.probe is not None:
        probe = BothProbes(value.probe, probe)
    probed = {f.name: _with_probe(getattr(value, f.name), probe) for f in dataclasses.fields(value) if f.init}
    return dataclasses.replace(value, **({**probed, "probe": probe} if isinstance(value, Group) else probed))


class ProbedSums:
    """``sums`` with an event around every addition over ranks; collectives inside it are events of their own."""

    def __init__(self, sums: FloatSums, probe: Probe) -> None:
        self._sums, self._probe = sums, probe

    def reduce_scatter(self, group: Group, flat: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter``."""
        return self._told("reduce_scatter", group, flat, lambda: self._sums.reduce_scatter(group, flat, block))

    def start_fold(self, group: Group, members: int, block: int) -> RunningFold:
        """As ``FloatSums.start_fold``."""
        return self._sums.start_fold(group, members, block)

    def reduce_scatter_part(self, group: Group, flat: torch.Tensor, running: RunningFold) -> Waiting:
        """As ``FloatSums.reduce_scatter_part``, and there at once; what it adds to is shown by whoever takes the
        result."""
        call = lambda: self._sums.reduce_scatter_part(group, flat, running)()  # noqa: E731
        self._told("reduce_scatter_part", group, flat, call)
        return nothing_to_wait_for

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.all_reduce``."""
        return self._told("all_reduce", group, tensor, lambda: self._sums.all_reduce(group, tensor))

    def reduce_scatter_rows(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter_rows``."""
        call = lambda: self._sums.reduce_scatter_rows(group, tensor)  # noqa: E731
        return self._told("reduce_scatter_rows", group, tensor, call)

    def _told(self, name: str, group: Group, given: torch.Tensor, call: Callable[[], Any]) -> Any:
        if group.size == 1:
            return call()
        number = self._probe.count(f"{name} {group.axis} {group.ranks}")
        meta = {"axis": group.axis, "ranks": list(group.ranks), "seq": number}
        return self._probe.around("sum", name, call, ins=given, meta=meta)
