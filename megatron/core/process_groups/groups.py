"""Group and ProcessGroups: the parallel axes as one rank sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.core.process_groups.topology import AXES, Coordinates, Topology
from megatron.core.trace.probe import Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One group of ranks along an axis.

    ``ranks`` are global ranks in axis order, ``rank`` is this process's position among them. ``handle`` is ``None``
    for a group of one, which never communicates. ``probe`` is told of every collective, where there is one.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None
    probe: Probe | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """True on the first member."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True on the last member."""
        return self.rank == self.size - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroups:
    """Every group this rank is a member of, the arithmetic they come from, and the device tensors travel on.

    ``expert`` joins the expert-parallel and expert-tensor-parallel ranks that exchange tokens, ``tp_dp`` the ranks of
    one pipeline stage; ``embedding`` joins first and last stage and is ``None`` on the stages between them.
    """

    topology: Topology
    at: Coordinates
    world: Group
    tp: Group
    dp: Group
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    expert: Group
    tp_dp: Group
    embedding: Group | None
    device: torch.device


def create_process_groups(topology: Topology, device: torch.device) -> ProcessGroups:
    """Create all groups. Call it on every rank after ``torch.distributed`` is initialised (not needed for a world of
    one rank).

    Raises:
        RuntimeError: the number of running processes is not ``topology.world``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != topology.world:
        raise RuntimeError(f"{world} processes are running, the layout needs {topology.world}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _groups(topology, rank, device, dist.group.WORLD if world > 1 else None, dist.new_group)


def plan_process_groups(topology: Topology, rank: int, device: torch.device) -> ProcessGroups:
    """The groups of one rank of a layout that is not running: sizes and positions, nothing to communicate with."""
    return _groups(topology, rank, device, None, lambda ranks: None)


def _groups(
    topology: Topology,
    rank: int,
    device: torch.device,
    everyone: dist.ProcessGroup | None,
    create: Callable[[list[int]], dist.ProcessGroup | None],
) -> ProcessGroups:
    """The groups that ``rank`` is a member of; ``create`` is called for every group of several ranks, in one order."""
    mine: dict[str, Group] = {}
    for axis in AXES:
        for ranks in topology.group_lists(axis):
            handle = create(ranks) if len(ranks) > 1 else None
            if rank in ranks:
                mine[axis] = Group(axis=axis, ranks=tuple(ranks), rank=ranks.index(rank), handle=handle)
    return ProcessGroups(
        topology=topology,
        at=topology.coordinates(rank),
        world=Group(axis="world", ranks=tuple(range(topology.world)), rank=rank, handle=everyone),
        device=device,
        embedding=mine.pop("embedding", None),
        **mine,
    )
