"""Copies of one state on data-parallel ranks are equal bit for bit; a run in which they are not is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.contracts.flat_buffer import Piece
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.sharded_state import ShardedState
from megatron.core.optimizer.state_digests import piece_digest
from megatron.core.process_groups.collectives import all_gather, gather_objects, sum_integers
from megatron.core.process_groups.groups import Group, ProcessGroups

_SHOWN = 3


@dataclass(frozen=True, slots=True, order=True)
class Drift:
    """A tensor of which global rank ``rank`` holds other bits than most of its replicas, or, where they are split
    evenly, than the first of them."""

    rank: int
    tensor: str


def find_drift(optimizer: Optimizer, groups: ProcessGroups) -> list[Drift]:
    """Compare working weights, and masters and moments that every rank holds whole, over the ranks that should hold
    the same (experts: over expert-data-parallel ranks). Only digests travel. Call it on all ranks; returns what is
    wrong in this rank's groups."""
    found: list[Drift] = []
    for state in optimizer.states:
        group = groups.edp if state.buffer.whole[0].pieces[0].spec.expert else groups.dp
        if group.size > 1:
            found += _unequal(state, group)
    return found


def stop_on_drift(optimizer: Optimizer, groups: ProcessGroups, iteration: int) -> None:
    """Stop every rank if replicas have drifted apart. Call it on all ranks.

    Raises:
        TrainingStoppedError: they have; names iteration, ranks and tensors.
    """
    found = find_drift(optimizer, groups)
    count = torch.tensor(len(found), dtype=torch.int64, device=groups.device)
    if int(sum_integers(groups.world, count)) == 0:
        return
    everywhere = cast(list[list[Drift]], gather_objects(groups.world, found))
    by_rank: dict[int, list[str]] = {}
    for drift in sorted({drift for of_rank in everywhere for drift in of_rank}):
        by_rank.setdefault(drift.rank, []).append(drift.tensor)
    ranks = [
        f"rank {rank} ({', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' * (len(names) > _SHOWN)})"
        for rank, names in by_rank.items()
    ]
    raise TrainingStoppedError(
        f"iteration {iteration}: replicas have drifted apart: {', '.join(ranks)}; the step was not "
        "taken and the last checkpoint is intact: test the machines (examples/fleet_health.sh) and go on from it"
    )


def _unequal(state: ShardedState, group: Group) -> Iterator[Drift]:
    rows = list(_copies(state))
    mine = torch.stack([piece_digest(piece, values) for _, piece, values in rows])
    every = all_gather(group, mine).tolist()
    for row, (kind, piece, _) in enumerate(rows):
        digests = [tuple(of_rank[row]) for of_rank in every]
        # The first of the most frequent ones, so all members name the same ranks.
        (expected, _), *_ = Counter(digests).most_common(1)
        for member, digest in enumerate(digests):
            if digest != expected:
                yield Drift(group.ranks[member], f"{kind} of {piece.spec.name}, shard {piece.shard}")


def _copies(state: ShardedState) -> Iterator[tuple[str, Piece, torch.Tensor]]:
    """What every replica of this rank should hold too."""
    pieces = [piece for span in state.buffer.whole for piece in span.pieces]
    for piece in pieces:
        yield "weights", piece, state.buffer.weights[piece.offset : piece.stop]
    if not state.distributed:
        for kind, flat in state.tensors().items():
            for piece in pieces:
                yield kind, piece, state.view(flat, piece.offset, piece.stop)
