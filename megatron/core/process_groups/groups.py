"""Group and ProcessGroups: the parallel axes as one rank sees them."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron.core.process_groups.topology import AXES, Coordinates, Topology, plan_blocks
from megatron.core.trace.probe import Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One group of ranks along an axis.

    ``ranks`` are global ranks in axis order, ``rank`` is this process's position among them. ``handle`` is ``None``
    for a group of one, which never communicates. ``blocks`` is set where the members are spread over machines so that
    a fold in blocks is made inside machines first; ``spread`` says that they are on several at all, where that is
    known. ``probe`` is told of every collective, where there is one.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None
    blocks: BlockGroups | None = None
    spread: bool = False
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
class BlockGroups:
    """A group cut into blocks of consecutive members: this member's block, and those in its place in every block."""

    inside: Group
    across: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where ranks live and which blocks gradients are summed in; neither changes a bit.

    ``nodes`` is one number per global rank, equal for ranks of one machine; ``block`` and ``expert_block`` are those of
    the logical layout.
    """

    nodes: tuple[int, ...]
    block: int
    expert_block: int


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


def create_process_groups(
    topology: Topology, device: torch.device, placement: Placement | None = None, timeout_minutes: int | None = None
) -> ProcessGroups:
    """Create all groups. Call it on every rank after ``torch.distributed`` is initialised (not needed for a world of
    one rank). With ``placement`` sums over data-parallel ranks of several machines are made inside machines first
    where their blocks allow it. ``timeout_minutes`` is the longest wait in a collective; default: the backend's.

    Raises:
        RuntimeError: the number of running processes is not ``topology.world``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != topology.world:
        raise RuntimeError(f"{world} processes are running, the layout needs {topology.world}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=timeout_minutes)
    new_group = functools.partial(dist.new_group, timeout=timeout)
    nodes = None if placement is None else placement.nodes
    groups = _groups(topology, rank, device, dist.group.WORLD if world > 1 else None, new_group, nodes)
    if placement is None:
        return groups
    return replace(
        groups,
        dp=_with_blocks(groups.dp, topology, rank, placement.nodes, placement.block, new_group),
        edp=_with_blocks(groups.edp, topology, rank, placement.nodes, placement.expert_block, new_group),
    )


def gather_nodes(host: str) -> tuple[int, ...]:
    """One number per global rank, equal for ranks that give the same ``host``; collective."""
    if not dist.is_initialized():
        return (0,)
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    return tuple(hosts.index(name) for name in hosts)


def plan_process_groups(topology: Topology, rank: int, device: torch.device) -> ProcessGroups:
    """The groups of one rank of a layout that is not running: sizes and positions, nothing to communicate with."""
    return _groups(topology, rank, device, None, lambda ranks: None)


def _groups(
    topology: Topology,
    rank: int,
    device: torch.device,
    everyone: dist.ProcessGroup | None,
    create: Callable[[list[int]], dist.ProcessGroup | None],
    nodes: Sequence[int] | None = None,
) -> ProcessGroups:
    """The groups that ``rank`` is a member of; ``create`` is called for every group of several ranks, in one order."""
    found = {axis: _group_of(rank, axis, topology.group_lists(axis), create, nodes) for axis in AXES}
    everybody = tuple(range(topology.world))
    mine = {axis: group for axis, group in found.items() if group is not None}
    return ProcessGroups(
        topology=topology,
        at=topology.coordinates(rank),
        world=Group(axis="world", ranks=everybody, rank=rank, handle=everyone, spread=_spread(everybody, nodes)),
        device=device,
        embedding=mine.pop("embedding", None),
        **mine,
    )


def _group_of(
    rank: int,
    axis: str,
    lists: Iterable[list[int]],
    create: Callable[[list[int]], dist.ProcessGroup | None],
    nodes: Sequence[int] | None,
) -> Group | None:
    """Create the group of every list; the one that holds ``rank``, if any."""
    mine = None
    for ranks in lists:
        handle = create(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            place, spread = ranks.index(rank), _spread(ranks, nodes)
            mine = Group(axis=axis, ranks=tuple(ranks), rank=place, handle=handle, spread=spread)
    return mine


def _spread(ranks: Sequence[int], nodes: Sequence[int] | None) -> bool:
    return nodes is not None and len({nodes[rank] for rank in ranks}) > 1


def _with_blocks(
    group: Group,
    topology: Topology,
    rank: int,
    nodes: Sequence[int],
    block: int,
    new_group: Callable[[list[int]], dist.ProcessGroup | None],
) -> Group:
    """The group with its blocks, where it has any; every rank goes through all groups of the axis, because all ranks
    create all groups."""
    blocks = None
    for ranks in topology.group_lists(group.axis):
        grid = plan_blocks([nodes[member] for member in ranks], block)
        if grid is None:
            continue
        inside, across = (
            _group_of(rank, group.axis, [[ranks[i] for i in members] for members in cut], new_group, nodes)
            for cut in (grid.inside, grid.across)
        )
        if inside is not None and across is not None:
            blocks = BlockGroups(inside=inside, across=across)
    return replace(group, blocks=blocks)
