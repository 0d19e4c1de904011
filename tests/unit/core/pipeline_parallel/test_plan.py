"""Pipeline plans are complete, in order, bounded, and their transfers match, for any number of micro-batches."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.plan import (
    Compute,
    PipelinePlan,
    Tick,
    Transfer,
    in_flight_limit,
    plan_pipeline,
)

SIZES = [(pp, vpp) for pp in range(1, 9) for vpp in range(1, 5)]
MICROBATCHES = range(1, 18)


def _needs(rank: int, compute: Compute, pp: int, vpp: int) -> list[tuple[int, Compute]]:
    """Passes that must be over before this one: (rank, pass)."""
    segment = compute.chunk * pp + rank
    needs = []
    if compute.kind == "forward":
        if segment > 0:
            needs.append(((segment - 1) % pp, Compute("forward", (segment - 1) // pp, compute.microbatch)))
        return needs
    needs.append((rank, Compute("forward", compute.chunk, compute.microbatch)))
    if segment < pp * vpp - 1:
        needs.append(((segment + 1) % pp, Compute("backward", (segment + 1) // pp, compute.microbatch)))
    return needs


def replay(plan: PipelinePlan, pp: int, vpp: int) -> list[list[Compute]]:
    """Run the plan as blocking processes would: a rank goes on once the partners of its tick's transfers have posted
    theirs. Raises AssertionError where it hangs, a pass lacks its input, or two ends disagree."""
    position = [0] * pp
    done: list[list[Compute]] = [[] for _ in range(pp)]
    available: list[set[Compute]] = [set() for _ in range(pp)]
    computed = [False] * pp
    while any(position[r] < len(plan.ranks[r]) for r in range(pp)):
        moved = False
        for rank in range(pp):
            if position[rank] == len(plan.ranks[rank]):
                continue
            tick = plan.ranks[rank][position[rank]]
            if not computed[rank]:
                if tick.compute is not None:
                    for source, need in _needs(rank, tick.compute, pp, vpp):
                        here = need in done[rank] if source == rank else tick.compute in available[rank]
                        assert here, f"rank {rank} starts {tick.compute} without {need}"
                    done[rank].append(tick.compute)
                computed[rank] = moved = True
            if all(_posts(plan, position, computed, rank, t) for t in (*tick.sends, *tick.receives)):
                position[rank], computed[rank], moved = position[rank] + 1, False, True
                available[rank].update(t.use for t in tick.receives)
        assert moved, f"hangs at {position}"
    return done


def _posts(plan: PipelinePlan, position: list[int], computed: list[bool], rank: int, transfer: Transfer) -> bool:
    """Whether the partner of a transfer has posted it, or is past it."""
    ticks = plan.ranks[transfer.peer]
    mirror = Transfer(rank, transfer.use)
    reached = ticks[: position[transfer.peer] + computed[transfer.peer]]
    return any(mirror in (*tick.sends, *tick.receives) for tick in reached)


@pytest.mark.parametrize(("pp", "vpp"), SIZES)
def test_every_pass_once_in_order_and_bounded(pp: int, vpp: int) -> None:
    for num_microbatches in MICROBATCHES:
        plan = plan_pipeline(pp, vpp, num_microbatches)
        for rank, passes in enumerate(replay(plan, pp, vpp)):
            assert len(passes) == len(set(passes)) == 2 * vpp * num_microbatches
            held = 0
            for compute in passes:
                held += 1 if compute.kind == "forward" else -1
                assert held <= in_flight_limit(rank, pp, vpp)
            for chunk in range(vpp):
                for kind in ("forward", "backward"):
                    order = [p.microbatch for p in passes if p.kind == kind and p.chunk == chunk]
                    assert order == list(range(num_microbatches))


@pytest.mark.parametrize(("pp", "vpp"), SIZES)
def test_transfers_of_two_ranks_match_in_number_and_order(pp: int, vpp: int) -> None:
    plan = plan_pipeline(pp, vpp, 7)
    for a in range(pp):
        for b in range(pp):
            sent = [[t.use for t in tick.sends if t.peer == b] for tick in plan.ranks[a]]
            received = [[t.use for t in tick.receives if t.peer == a] for tick in plan.ranks[b]]
            assert [uses for uses in sent if uses] == [uses for uses in received if uses]


@pytest.mark.parametrize("num_microbatches", [1, 5, 16])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_one_chunk_takes_as_long_as_1f1b(pp: int, num_microbatches: int) -> None:
    assert plan_pipeline(pp, 1, num_microbatches).num_ticks == 2 * num_microbatches + 2 * (pp - 1)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3)])
def test_more_chunks_keep_the_idle_ticks_though_passes_are_shorter(pp: int, vpp: int) -> None:
    num_microbatches = 4 * pp
    assert plan_pipeline(pp, vpp, num_microbatches).num_ticks == 2 * vpp * num_microbatches + 2 * (pp - 1)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (1, 3), (3, 1), (4, 2)])
def test_evaluation_has_forwards_only(pp: int, vpp: int) -> None:
    for passes in replay(plan_pipeline(pp, vpp, 5, forward_only=True), pp, vpp):
        assert {p.kind for p in passes} == {"forward"}
        assert len(passes) == 5 * vpp


def test_a_lost_transfer_and_a_wrong_order_are_seen() -> None:
    plan = plan_pipeline(2, 1, 3)
    first, second = plan.ranks
    lost = (Tick(first[0].compute), *first[1:])
    with pytest.raises(AssertionError, match="hangs"):
        replay(PipelinePlan((lost, second), plan.num_ticks), 2, 1)
    backward = next(i for i, tick in enumerate(second) if tick.compute and tick.compute.kind == "backward")
    early = (second[backward], *second[:backward], *second[backward + 1 :])
    with pytest.raises(AssertionError, match="without|hangs"):
        replay(PipelinePlan((first, early), plan.num_ticks), 2, 1)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_pipeline(*sizes)
