"""Rank arithmetic of the dense grid and the expert grid, physical and logical; pure, no processes needed.

Ranks are laid out tensor-parallel fastest, then data-parallel, then pipeline. Inside one pipeline stage the ranks
``w = dp * TP + tp`` are read a second time as the expert grid: expert-tensor-parallel fastest, then expert-parallel,
then expert-data-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalLayout:
    """What fixes the bits of a run besides its recipe; stored in checkpoints and manifests.

    ``ldp`` is the logical data-parallel size, ``block`` the number of consecutive logical shards that are summed
    first (B).
    """

    ldp: int
    block: int
    tp: int
    ep: int
    etp: int
    padded_vocab_size: int
    micro_batch_size: int

    def shards_of(self, dp_rank: int, dp: int) -> tuple[int, ...]:
        """Logical shards of one of ``dp`` data-parallel ranks, in pass order: shard v is worked on in pass v // DP by
        rank v % DP."""
        return tuple(range(dp_rank, self.ldp, dp))

    @property
    def expert_groups(self) -> int:
        """Logical expert groups: sums over disjoint sets of expert-parallel ranks that are folded for one expert."""
        return self.tp * self.ldp // (self.etp * self.ep)

    @property
    def expert_block(self) -> int:
        """Consecutive logical expert groups that are summed first."""
        return max(1, self.block * self.tp // (self.etp * self.ep))


def default_block(ldp: int, tp: int) -> int:
    """B when not given: min(LDP, max(1, 8 // TP)), a function of the logical layout alone."""
    return min(ldp, max(1, 8 // tp))


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where one rank stands on both grids."""

    tp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Physical sizes of the axes. Build it with ``plan_topology``, which checks that they fit."""

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: ranks of one stage that hold the same expert weights."""
        return self.tp * self.dp // (self.etp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank."""
        tp, rest = rank % self.tp, rank // self.tp
        dp, pp = rest % self.dp, rest // self.dp
        within = dp * self.tp + tp
        etp, ep = within % self.etp, within // self.etp % self.ep
        return Coordinates(tp=tp, dp=dp, pp=pp, etp=etp, ep=ep, edp=within // (self.etp * self.ep))

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """Global rank at dense coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def group_lists(self, axis: str) -> list[list[int]]:
        """Members of every group along an axis, ascending in axis order, groups ordered by their first member.

        Axes: ``tp dp pp ep etp edp`` (one coordinate varies), ``expert`` (etp and ep vary: the ranks that share a
        token exchange), ``tp_dp`` (one pipeline stage), ``embedding`` (first and last stage of a pipeline).
        """
        varying = {"expert": {"etp", "ep"}, "tp_dp": {"tp", "dp"}, "embedding": {"pp"}}.get(axis, {axis})
        names = ("etp", "ep", "edp", "pp") if varying & {"etp", "ep", "edp"} else ("tp", "dp", "pp")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            if axis == "embedding" and at.pp not in (0, self.pp - 1):
                continue
            key = tuple(getattr(at, name) for name in names if name not in varying)
            groups.setdefault(key, []).append(rank)
        return sorted(groups.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGrid:
    """The members of one group as a grid: ``inside`` are the blocks of consecutive members, ``across`` the members
    that have the same place in every block; positions in the group, in fold order."""

    inside: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]


def plan_blocks(nodes: Sequence[int], block: int) -> BlockGrid | None:
    """How a fold over members that live on ``nodes`` (one per member, in fold order) is made in two stages: inside
    blocks of ``block`` members, then between the blocks. The additions and their order are those of the fold in one
    stage; what crosses nodes is one sum per block instead of one term per member.

    ``None`` where one stage is as good or the only one: a single node, a single block, blocks of one, blocks that
    reach over nodes, or a block that does not divide the members.
    """
    size = len(nodes)
    if not 1 < block < size or size % block or len(set(nodes)) == 1:
        return None
    inside = tuple(tuple(range(start, start + block)) for start in range(0, size, block))
    if any(len({nodes[member] for member in members}) > 1 for members in inside):
        return None
    return BlockGrid(inside=inside, across=tuple(zip(*inside, strict=True)))


AXES = ("tp", "dp", "pp", "ep", "etp", "edp", "expert", "tp_dp", "embedding")
"""Every axis that gets process groups, in the order they are created on all ranks."""


def topology_problems(world: int, tp: int, pp: int, ep: int, etp: int) -> list[Problem]:
    """Why these sizes do not fit a world of this many ranks; empty when they do."""
    problems = []
    if world % (tp * pp):
        problems.append(
            Problem(
                f"{_processes(world)} with --tensor-model-parallel-size {tp} and --pipeline-model-parallel-size {pp}",
                f"the number of processes to be a multiple of {tp} * {pp} = {tp * pp}",
                "the number of processes started (torchrun --nproc-per-node, --nnodes) or one of the two flags",
            )
        )
    elif world % (etp * ep * pp):
        problems.append(
            Problem(
                f"{_processes(world)} with --expert-tensor-parallel-size {etp}, --expert-model-parallel-size {ep} "
                f"and --pipeline-model-parallel-size {pp}",
                f"the number of processes to be a multiple of {etp} * {ep} * {pp} = {etp * ep * pp}",
                "--expert-model-parallel-size or --expert-tensor-parallel-size (default: the tensor-parallel size)",
            )
        )
    return problems


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def plan_topology(*, world: int, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> Topology:
    """Lay out ``world`` ranks.

    Raises:
        ConfigError: the sizes do not divide.
    """
    etp = tp if etp is None else etp
    problems = topology_problems(world, tp, pp, ep, etp)
    if problems:
        raise ConfigError(problems)
    return Topology(tp=tp, pp=pp, dp=world // (tp * pp), ep=ep, etp=etp)
