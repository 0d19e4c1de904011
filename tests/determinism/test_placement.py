"""Where ranks live and how long messages take changes no bit; another order of additions does, and is seen."""

from __future__ import annotations

import datetime
import functools

import pytest
import torch
import torch.distributed as dist

from megatron.core.digest.bits import same_bits
from tests.determinism.trajectories import NOISY, Circumstance, Seen, under_circumstances
from tests.support.ranks import run_ranks

# The first test of a world trains for all of them.
pytestmark = pytest.mark.timeout(400)
LIMIT_S = 360.0
STEPS = 2
COMMAND = (
    f"{NOISY} --use-distributed-optimizer --hybrid-layer-pattern ME* "
    "--logical-data-parallel-size 4 --global-batch-size 4 --logical-reduce-block-size "
)
PLACEMENTS = (
    Circumstance(),
    Circumstance(nodes=(0, 0, 1, 1), delays=1),
    Circumstance(nodes=(1, 1, 0, 0), delays=2),
    Circumstance(nodes=(0, 1, 0, 1), delays=3),
    Circumstance(nodes=(3, 1, 2, 0)),
)
CONTROLS = {
    4: (Circumstance(sums="shuffled"), Circumstance(sums="native")),
    2: (Circumstance(), Circumstance(sums="restarting"), Circumstance(sums="native")),
}


@functools.cache
def _seen(world: int, block: int) -> list[list[Seen]]:
    """By circumstance, what the first rank saw; ranks agree among each other."""
    placements = PLACEMENTS if (world, block) == (4, 2) else ()
    circumstances = (*placements, *CONTROLS[world])
    of_ranks = run_ranks(world, under_circumstances, f"{COMMAND} {block}", STEPS, circumstances, timeout_s=LIMIT_S)
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    return of_ranks[0]


def _by_ring(ring: list[int]) -> torch.Tensor:
    """The backend's own sum of three tensors, with ranks at other places of its ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"ring {ring}", dist.distributed_c10d._get_default_store())
    backend = dist.ProcessGroupGloo(store, ring.index(rank), size, datetime.timedelta(seconds=30))
    mine = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    backend.allreduce([mine]).wait()
    return mine


def _by_rings(rings: list[list[int]]) -> list[torch.Tensor]:
    return [_by_ring(ring) for ring in rings]


def test_a_ring_that_starts_elsewhere_adds_differently() -> None:
    """The plain reduction at three ranks: reversed and rotated rings of one backend are other sums."""
    straight, *others = run_ranks(3, _by_rings, [[0, 1, 2], [2, 1, 0], [1, 2, 0]])[0]
    assert any(not same_bits(other, straight) for other in others)


@pytest.mark.parametrize("number", range(1, len(PLACEMENTS)))
def test_placement_and_delays_change_no_bit(number: int) -> None:
    seen = _seen(4, 2)
    assert seen[number] == seen[0]


def test_a_sum_in_another_order_gives_other_bits() -> None:
    """The control of the test above, at four ranks."""
    seen = _seen(4, 2)
    shuffled = seen[len(PLACEMENTS)]
    assert shuffled[0].numbers["lm loss"] == seen[0][0].numbers["lm loss"], "the first loss is before any sum"
    assert shuffled[0].state["main_params"] != seen[0][0].state["main_params"]


def test_a_backends_sum_follows_the_number_of_ranks() -> None:
    """The plain reduction: one recipe on four and on two ranks is two trajectories; ours is one."""
    four, two = _seen(4, 2), _seen(2, 2)
    assert two[0] == four[0]
    native = -1
    assert two[native][0].state["main_params"] != four[native][0].state["main_params"]


def test_a_fold_that_restarts_with_each_pass_gives_other_bits() -> None:
    """Blocks of 4 over passes of 2: the second pass has to go on with the open block."""
    seen = _seen(2, 4)
    assert seen[1][0].state["main_params"] != seen[0][0].state["main_params"]
