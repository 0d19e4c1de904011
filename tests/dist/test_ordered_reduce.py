"""Ordered sums: same bits as the stated order on one rank, on any number of ranks; the plain sum is the control."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups import ordered_reduce
from megatron.core.process_groups.collectives import (
    all_gather,
    all_to_all,
    all_to_all_rows,
    all_to_all_terms,
    exchange,
    start_all_gather,
    sum_integers,
)
from megatron.core.process_groups.float_sum_guard import refuse_float_sums
from megatron.core.process_groups.groups import Placement, create_process_groups
from megatron.core.process_groups.topology import plan_topology
from tests.support.ranks import groups_for_test, ordered_sums, run_ranks


def _contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    scale = 10.0 ** torch.randint(-6, 6, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def _sum_everywhere(numel: int, dtype: torch.dtype, block: int) -> dict[str, torch.Tensor]:
    groups, sums = groups_for_test(), ordered_sums()
    mine = _contribution(groups.dp.rank, numel, dtype)
    return {
        "reduce_scatter": sums.reduce_scatter(groups.dp, mine, block),
        "all_reduce": sums.all_reduce(groups.dp, mine),
        "rows": sums.reduce_scatter_rows(groups.dp, mine.view(groups.dp.size * 2, -1)),
    }


@pytest.mark.parametrize(
    ("world", "block", "dtype"), [(2, 2, torch.float32), (3, 2, torch.float32), (4, 2, torch.bfloat16)]
)
@pytest.mark.parametrize("numel", [24, 12 * 4096])
def test_sums_follow_the_stated_order(world: int, block: int, dtype: torch.dtype, numel: int) -> None:
    seen = run_ranks(world, _sum_everywhere, numel, dtype, block)
    slots = torch.stack([_contribution(r, numel, dtype) for r in range(world)])
    scattered = torch.cat([s["reduce_scatter"] for s in seen])
    assert same_bits(scattered, blocked_fold(slots, block))
    whole = blocked_fold(slots, world).to(dtype)
    assert all(same_bits(s["all_reduce"], whole) for s in seen)
    assert same_bits(torch.cat([s["rows"].reshape(-1) for s in seen]), whole)


def test_another_order_gives_other_bits() -> None:
    slots = torch.stack([_contribution(r, 4096, torch.float32) for r in range(3)])
    assert not same_bits(blocked_fold(slots, 3), blocked_fold(slots.flip(0), 3))


def _sums_of_two(in_transit: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rank function: every sum of a group of two, and a fold over six members in blocks of two, of four and of all."""
    asked = ordered_reduce._adds_in_transit
    ordered_reduce._adds_in_transit = lambda group, tensor: in_transit
    remove = refuse_float_sums()
    try:
        group, sums = groups_for_test().dp, ordered_sums()
        mine = _contribution(group.rank, 12 * 4096, dtype)
        got = [sums.all_reduce(group, mine), sums.reduce_scatter_rows(group, mine.view(4, -1))]
        for block in (2, 4, 6):
            running = sums.start_fold(group, 6, block)
            for number in range(3):
                sums.reduce_scatter_part(group, _contribution(2 * number + group.rank, 12 * 4096, dtype), running)()
            got.append(running.result())
        return [*got, sums.reduce_scatter(group, mine)]
    finally:
        remove()
        ordered_reduce._adds_in_transit = asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_members_added_in_transit_give_the_stated_bits(dtype: torch.dtype) -> None:
    """gloo here, which adds as NCCL does: once. tests/gpu/test_sum_of_two.py has NCCL."""
    for ordered, in_transit in zip(*(run_ranks(2, _sums_of_two, way, dtype) for way in (False, True)), strict=True):
        assert [same_bits(a, b) for a, b in zip(ordered, in_transit, strict=True)] == [True] * 6


def _two_stages(nodes: list[int], block: int, passes: int) -> tuple[bool, torch.Tensor]:
    """Whether the group has blocks, and this rank's part of a sum over ``passes`` members per rank."""
    world = len(nodes)
    placement = Placement(nodes=tuple(nodes), block=block, expert_block=1)
    groups = create_process_groups(plan_topology(world=world), torch.device("cpu"), placement)
    sums, group = ordered_sums(), groups.dp
    running = sums.start_fold(group, world * passes, block)
    for number in range(passes):
        mine = _contribution(number * world + group.rank, 12 * 64, torch.float32)
        sums.reduce_scatter_part(group, mine, running)()
    return group.blocks is not None, running.result()


def _two_stages_of_all(cases: list[tuple[list[int], int, int]]) -> list[tuple[bool, torch.Tensor]]:
    return [_two_stages(*case) for case in cases]


def test_inside_machines_first_has_the_bits_of_one_stage() -> None:
    """Pretend machines: whether and how blocks fit them decides how terms travel, never what is added in which
    order."""
    cases = [
        ([0, 0, 1, 1, 2, 2], 2, 1),
        ([0, 0, 1, 1, 2, 2], 2, 3),
        ([0, 0, 0, 1, 1, 1], 3, 2),
        ([0, 1, 0, 1, 0, 1], 2, 3),
        ([0, 0, 1, 1, 2, 2], 3, 2),
    ]
    seen = run_ranks(6, _two_stages_of_all, cases)
    for number, (nodes, block, passes) in enumerate(cases):
        slots = torch.stack([_contribution(v, 12 * 64, torch.float32) for v in range(6 * passes)])
        got = torch.cat([of_rank[number][1] for of_rank in seen])
        assert same_bits(got, blocked_fold(slots, block)), (nodes, block)
    assert [two_stages for two_stages, _ in seen[0]] == [True, True, True, False, False]


def _other_collectives() -> tuple[list[float], int, float]:
    groups = groups_for_test(pp=3)
    me, size = groups.pp.rank, groups.pp.size
    rows = torch.full((3, 2), float(me))
    got = all_to_all_rows(groups.pp, rows, [0, 1, 2], [(0, 1, 2)[me]] * 3)
    received = torch.empty(5)
    exchange(groups.pp, [((me + 1) % size, torch.full((5,), float(me)))], [((me - 1) % size, received)])
    return got[:, 0].tolist(), int(sum_integers(groups.pp, torch.tensor(me))), float(received[0])


def test_rank_indexed_collectives() -> None:
    assert run_ranks(3, _other_collectives) == [
        ([], 3, 2.0),
        ([0.0, 1.0, 2.0], 3, 0.0),
        ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], 3, 1.0),
    ]


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn)
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (0,), (4, 2, 3), (4, 0), (5, 1))


def _bits_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, such as no value has to survive: for bool, of which only two are values, those."""
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return bits.to(torch.uint8).view(dtype).view(shape)


def _copies(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Rank function: one tensor over every way that copies travel, as bytes."""
    group = groups_for_test().dp
    mine = _bits_of(group.rank, shape, dtype)
    slots, received = torch.stack([mine, mine]), torch.empty_like(mine)
    exchange(group, [(1 - group.rank, mine)], [(1 - group.rank, received)])
    whole = torch.zeros(2 * mine.numel(), dtype=dtype)
    whole[group.rank * mine.numel() :][: mine.numel()] = mine.reshape(-1)
    start_all_gather(group, whole)()
    got = [all_gather(group, mine), all_to_all(group, slots), torch.stack(list(all_to_all_terms(group, slots)))]
    got += [whole.view(2, *shape), received]
    if shape:
        ones = [mine.shape[0] - 1, 1] if mine.shape[0] else [0, 0]
        swapped = ones if group.rank == 0 else ones[::-1]
        got.append(all_to_all_rows(group, mine, ones, [swapped[0], swapped[0]]))
    return [copy.contiguous().view(-1).view(torch.uint8) for copy in got]


def _copies_of_all(cases: list[tuple[tuple[int, ...], torch.dtype]]) -> list[list[torch.Tensor]]:
    return [_copies(*case) for case in cases]


def test_copies_keep_every_bit_of_every_type_and_shape() -> None:
    cases = [(shape, dtype) for shape in SHAPES for dtype in TYPES]
    for rank, seen in enumerate(run_ranks(2, _copies_of_all, cases)):
        for (shape, dtype), got in zip(cases, seen, strict=True):
            both = [_bits_of(r, shape, dtype) for r in range(2)]
            pair = torch.stack(both)
            want = [pair, pair, pair, pair, both[1 - rank]]
            if shape:
                cut = max(0, shape[0] - 1)
                want.append(torch.cat([t[:cut] if rank == 0 else t[cut:] for t in both]))
            bits = [t.contiguous().view(-1).view(torch.uint8) for t in want]
            assert [torch.equal(a, b) for a, b in zip(got, bits, strict=True)] == [True] * len(want), (shape, dtype)


def test_float_sums_outside_the_module_are_refused() -> None:
    with pytest.raises(TypeError, match="ordered_reduce"):
        sum_integers(groups_for_test().dp, torch.zeros(3))


def _fails_on_one_rank() -> None:
    if groups_for_test().dp.rank == 1:
        raise KeyError("planted")


def test_the_failing_rank_is_the_test_failure() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2.*planted|planted"):
        run_ranks(2, _fails_on_one_rank)


def _longest_wait() -> float:
    """Rank function: the timeout, in seconds, of a group that was made with three minutes."""
    group = create_process_groups(plan_topology(world=2), torch.device("cpu"), timeout_minutes=3).dp
    return group.handle._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_every_group_waits_as_long_as_it_was_told() -> None:
    assert run_ranks(2, _longest_wait) == [180.0, 180.0]


def _spread_groups() -> dict[str, bool]:
    """Rank function: which groups of TP2 x DP2 are on several machines when ranks 0 and 1 share one."""
    placement = Placement(nodes=(0, 0, 1, 1), block=1, expert_block=1)
    groups = create_process_groups(plan_topology(world=4, tp=2), torch.device("cpu"), placement)
    return {name: getattr(groups, name).spread for name in ("tp", "dp", "pp", "world")}


def test_groups_know_whether_they_are_on_several_machines() -> None:
    assert run_ranks(4, _spread_groups) == [{"tp": False, "dp": True, "pp": False, "world": True}] * 4
