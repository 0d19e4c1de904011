"""Pipeline plans are complete, in order, bounded, and their transfers match, for any number of micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel.plan import (
    Compute,
    PipelinePlan,
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
    """Run the plan as processes would that start the transfers of a tick after its pass and go on, and before a pass
    wait until the partners of those they have to wait for have started them too. Raises AssertionError where it hangs,
    a pass lacks its input, or two ends disagree."""
    position, complete = [0] * pp, [0] * pp
    started: list[set[Transfer]] = [set() for _ in range(pp)]
    received: list[set[Compute]] = [set() for _ in range(pp)]
    done: list[dict[Compute, None]] = [{} for _ in range(pp)]

    def completes(rank: int, ticks: int) -> bool:
        """Whether the transfers of the rank's first ticks have been started at both ends."""
        for tick in plan.ranks[rank][complete[rank] : ticks]:
            if any(Transfer(rank, t.use) not in started[t.peer] for t in (*tick.sends, *tick.receives)):
                return False
            received[rank].update(t.use for t in tick.receives)
            complete[rank] += 1
        return True

    while any(position[r] < len(plan.ranks[r]) for r in range(pp)):
        moved = False
        for rank in range(pp):
            while position[rank] < len(plan.ranks[rank]):
                tick = plan.ranks[rank][position[rank]]
                assert tick.waits <= position[rank], "waits for what it has not started"
                if not completes(rank, tick.waits):
                    break
                if tick.compute is not None:
                    for source, need in _needs(rank, tick.compute, pp, vpp):
                        here = need in done[rank] if source == rank else tick.compute in received[rank]
                        assert here, f"rank {rank} starts {tick.compute} without {need}"
                    done[rank][tick.compute] = None
                started[rank].update((*tick.sends, *tick.receives))
                position[rank], moved = position[rank] + 1, True
        assert moved, f"hangs at {position}"
    for rank, ticks in enumerate(plan.ranks):
        assert completes(rank, len(ticks)), f"rank {rank} hangs at the end"
    return [list(passes) for passes in done]


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


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), (4, 2), (8, 4)])
@pytest.mark.parametrize("num_microbatches", [1, 4, 5])
def test_overlap_moves_waits_alone_and_bounds_what_is_open(pp: int, vpp: int, num_microbatches: int) -> None:
    plain, overlapped = (plan_pipeline(pp, vpp, num_microbatches, overlap=on) for on in (False, True))
    assert replay(plain, pp, vpp) == replay(overlapped, pp, vpp)
    for before, after in zip(plain.ranks, overlapped.ranks, strict=True):
        assert [replace(tick, waits=0) for tick in before] == [replace(tick, waits=0) for tick in after]
        assert [tick.waits for tick in before] == list(range(len(before)))
        waits = [tick.waits for tick in after]
        assert waits == sorted(waits)
        assert all(number - pp <= wait <= number for number, wait in enumerate(waits))
    assert any(tick.waits < number for ticks in overlapped.ranks for number, tick in enumerate(ticks))


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
    lost = (replace(first[0], sends=()), *first[1:])
    with pytest.raises(AssertionError, match="hangs"):
        replay(PipelinePlan((lost, second), plan.num_ticks), 2, 1)
    backward = next(i for i, tick in enumerate(second) if tick.compute and tick.compute.kind == "backward")
    early = (second[backward], *second[:backward], *second[backward + 1 :])
    with pytest.raises(AssertionError, match="without|hangs|not started"):
        replay(PipelinePlan((first, early), plan.num_ticks), 2, 1)
    hasty = tuple(replace(tick, waits=0) for tick in second)
    with pytest.raises(AssertionError, match="without"):
        replay(PipelinePlan((first, hasty), plan.num_ticks), 2, 1)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_pipeline(*sizes)
