"""Which chunk of which rank works on which micro-batch when, and what travels afterwards; pure.

All ranks are simulated together in ticks. In a tick a rank does at most one forward or one backward; at its end the
results travel, so both ends of a transfer know its tick and no rank waits for a partner that will not post. Every
rank takes its forwards and its backwards in a fixed order, and a forward first while fewer than a limit wait for their
backward. The limit bounds the activations held, and makes forwards and backwards alternate as in 1F1B and its
interleaved form (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
SC 2021). Any number of micro-batches works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class Compute:
    """One forward or backward of a rank's chunk on one of the rank's micro-batches of the step, counted over all its
    logical shards."""

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor between this rank and pipeline rank ``peer``; ``use`` is the pass of the *receiving* rank that it is
    for (a forward: an activation; a backward: an output gradient)."""

    peer: int
    use: Compute


@dataclass(frozen=True, slots=True)
class Tick:
    """What one rank does in one tick: at most one pass, then it starts the transfers, in the order both ends know.

    Before the pass it waits until the transfers of its first ``waits`` ticks are complete.
    """

    compute: Compute | None
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    waits: int = 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The ticks of every rank; ticks in which a rank has nothing to do are left out of its list. After its last one a
    rank waits for whatever is not complete."""

    ranks: tuple[tuple[Tick, ...], ...]
    num_ticks: int


def in_flight_limit(rank: int, pp: int, vpp: int) -> int:
    """Forwards a rank may have done without their backward.

    One chunk: PP - rank (1F1B). Several: 2 (PP - rank - 1) + (VPP - 1) PP + 1, the warm-up of the interleaved
    schedule plus the one in work.
    """
    return pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp + 1


def _order(pp: int, vpp: int, num_microbatches: int, kind: Literal["forward", "backward"]) -> list[Compute]:
    """Passes of one rank: groups of PP micro-batches, in each group chunk after chunk (backwards from the last), in
    each chunk ascending. So each chunk's passes ascend over all."""
    chunks = range(vpp) if kind == "forward" else range(vpp - 1, -1, -1)
    return [
        Compute(kind, chunk, microbatch)
        for start in range(0, num_microbatches, pp)
        for chunk in chunks
        for microbatch in range(start, min(start + pp, num_microbatches))
    ]


class _Rank:
    """State of one simulated rank: what it has still to do and which of its passes have their input."""

    def __init__(self, rank: int, pp: int, vpp: int, num_microbatches: int) -> None:
        self.rank, self.last_chunk = rank, vpp - 1
        self.is_first, self.is_last = rank == 0, rank == pp - 1
        self.limit = in_flight_limit(rank, pp, vpp)
        self.forwards = _order(pp, vpp, num_microbatches, "forward")
        self.backwards = _order(pp, vpp, num_microbatches, "backward")
        self.done_forwards: set[Compute] = set()
        self.next_forward = self.next_backward = 0
        self.arrived: set[Compute] = set()

    def choose(self) -> Compute | None:
        """The pass of this tick: the next forward if it is ready and allowed, else the next backward if it is ready."""
        if self.next_forward < len(self.forwards) and self.next_forward - self.next_backward < self.limit:
            forward = self.forwards[self.next_forward]
            if forward in self.arrived or (self.is_first and forward.chunk == 0):
                self.next_forward += 1
                self.done_forwards.add(forward)
                return forward
        if self.next_backward < len(self.backwards):
            backward = self.backwards[self.next_backward]
            own_loss = self.is_last and backward.chunk == self.last_chunk
            done = Compute("forward", backward.chunk, backward.microbatch) in self.done_forwards
            if done and (own_loss or backward in self.arrived):
                self.next_backward += 1
                return backward
        return None

    @property
    def is_done(self) -> bool:
        """True once nothing is left to do."""
        return self.next_forward == len(self.forwards) and self.next_backward == len(self.backwards)


def _consumer(rank: int, compute: Compute, pp: int, vpp: int) -> tuple[int, Compute] | None:
    """The rank and pass that the result of a pass is for, or ``None`` at either end of the model."""
    step = 1 if compute.kind == "forward" else -1
    segment = compute.chunk * pp + rank + step
    if not 0 <= segment < pp * vpp:
        return None
    return segment % pp, Compute(compute.kind, segment // pp, compute.microbatch)


def _simulate(ranks: list[_Rank], pp: int, vpp: int) -> Iterator[list[Tick]]:
    while not all(rank.is_done for rank in ranks):
        computes = [rank.choose() for rank in ranks]
        sends: list[list[Transfer]] = [[] for _ in ranks]
        receives: list[list[Transfer]] = [[] for _ in ranks]
        moves = [
            (source, *consumer)
            for source, compute in enumerate(computes)
            if compute is not None and (consumer := _consumer(source, compute, pp, vpp)) is not None
        ]
        # One order for both ends: several transfers between two ranks must match.
        for source, target, use in sorted(moves, key=lambda move: move[2]):
            ranks[target].arrived.add(use)
            if source != target:
                sends[source].append(Transfer(target, use))
                receives[target].append(Transfer(source, use))
        if not any(computes):
            raise AssertionError(f"no pass is ready with pp {pp}, vpp {vpp}: {[r.next_forward for r in ranks]}")
        yield [Tick(c, tuple(s), tuple(r)) for c, s, r in zip(computes, sends, receives, strict=True)]


def _with_waits(ticks: list[Tick], open_ticks: int) -> Iterator[Tick]:
    """The ticks of one rank, each waiting for the transfer that brings its input, and for all but the last
    ``open_ticks`` ticks before it, which bounds the tensors that are kept for transfers.

    Every wait is for transfers of earlier ticks, whose other ends were started in those ticks too, so no ring of ranks
    can wait for one another.
    """
    brought = {transfer.use: number for number, tick in enumerate(ticks) for transfer in tick.receives}
    waits = 0
    for number, tick in enumerate(ticks):
        input_at = brought.get(tick.compute, -1) if tick.compute is not None else -1
        waits = max(waits, input_at + 1, number - open_ticks)
        yield replace(tick, waits=waits)


@lru_cache(maxsize=64)
def plan_pipeline(
    pp: int, vpp: int, num_microbatches: int, forward_only: bool = False, overlap: bool = False
) -> PipelinePlan:
    """The plan of ``num_microbatches`` (1 or more) through ``pp`` ranks with ``vpp`` chunks each; chunk c of rank r is
    segment c * PP + r of the model. ``forward_only`` leaves out backwards, for evaluation. With ``overlap`` transfers
    of up to ``pp`` ticks go on beside passes that do not need them, without, those of a tick are complete before the
    rank's next one; passes and transfers are the same ones in the same order.

    Raises:
        ValueError: a size is below 1.
    """
    if min(pp, vpp, num_microbatches) < 1:
        raise ValueError(f"pp {pp}, vpp {vpp} and num_microbatches {num_microbatches} must be at least 1")
    ranks = [_Rank(rank, pp, vpp, num_microbatches) for rank in range(pp)]
    if forward_only:
        for rank in ranks:
            rank.backwards, rank.limit = [], len(rank.forwards)
    ticks = list(_simulate(ranks, pp, vpp))
    busy = [[tick[r] for tick in ticks if tick[r] != Tick(None)] for r in range(pp)]
    waiting = (tuple(_with_waits(of_rank, pp if overlap else 0)) for of_rank in busy)
    return PipelinePlan(ranks=tuple(waiting), num_ticks=len(ticks))
