"""Overlap changes no bit: buckets that leave during the backward, weights that arrive during the forward, late ranks.

Two things are made as bad as they can be. A bucket is summed in the very moment in which it leaves, so a gradient that
came later would be lost; and what other ranks own of the weights is NaN until somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.readiness import Readiness, Unit
from megatron.core.process_groups.collectives import Waiting, all_gather
from megatron.core.process_groups.groups import Group
from megatron.core.process_groups.lane import Lane
from tests.determinism.trajectories import NOISY, Circumstance, Seen, trajectory
from tests.support.ranks import run_ranks
from tests.support.training import TIED, TINY

pytestmark = pytest.mark.timeout(300)
STEPS = 2
CUT = "--use-distributed-optimizer"
LDP4 = "--logical-data-parallel-size 4 --global-batch-size 8"
LDP2 = "--logical-data-parallel-size 2 --global-batch-size 4"
TP2 = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = f"--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|E*|E|M/*E {FULL} --calculate-per-token-loss"
CELLS = {
    "DP2": (2, TINY, f"{CUT} {LDP2} --hybrid-layer-pattern ME* --grad-reduce-in-bf16"),
    "DP2-whole-optimizer": (2, TINY, f"{LDP2} --hybrid-layer-pattern ME*"),
    "LDP4-over-DP2-tied-MTP": (2, TIED, f"{CUT} {LDP4} --hybrid-layer-pattern ME*/*E"),
    "TP2-SP-EP2xDP2": (4, TINY, f"{CUT} {LDP2} --hybrid-layer-pattern ME* {TP2}"),
    "PP2xVPP2xDP2-tied-MTP": (4, TIED, f"{CUT} {LDP4} {PP2}"),
}


def _poisoned(group: Group, whole: torch.Tensor) -> Waiting:
    """A gather that leaves NaN where other ranks' part will be, and travels when it is waited for."""
    cut = whole.numel() // group.size
    mine = whole[group.rank * cut : (group.rank + 1) * cut].clone()
    if whole.is_floating_point():
        whole.fill_(float("nan"))

    def arrive() -> None:
        whole.copy_(all_gather(group, mine).view(-1))

    return arrive


def _eager(lane: Lane, start: Callable[[], Waiting]) -> None:
    start()()


def _hostile(flags: str, base: str) -> tuple[list[Seen], int]:
    """A trajectory under the two conditions of the head, and how many buckets left before the pass ended."""
    early: list[str] = []
    real = param_and_grad_buffer.start_all_gather, Lane.begin, Readiness._give

    def give(self: Readiness, chunk: int, unit: Unit) -> None:
        if self._chunk is not None:
            early.append(unit.params[0].spec.name)
        real[2](self, chunk, unit)

    def restore(*what: Any) -> None:
        param_and_grad_buffer.start_all_gather, Lane.begin, Readiness._give = what

    restore(_poisoned if "param-gather" in flags else real[0], _eager, give)
    try:
        return trajectory(flags, STEPS, base=base), len(early)
    finally:
        restore(*real)


def _with_and_without(flags: str, base: str) -> tuple[list[list[Seen]], int]:
    """Rank function: without overlap, hostile, and with other buckets and late ranks."""
    both = "--overlap-grad-reduce" + (" --overlap-param-gather" if CUT in flags else "")
    flags = f"{NOISY} {flags}"
    hostile, early = _hostile(f"{flags} {both} --ddp-bucket-size 3000", base)
    plain = trajectory(f"{flags} --no-overlap-p2p-communication", STEPS, base=base)
    late = trajectory(f"{flags} {both} --ddp-num-buckets 5", STEPS, Circumstance(delays=4), base)
    return [plain, hostile, late], early


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if cell[0] > 2 else []) for name, cell in CELLS.items()]
)
def test_overlap_changes_no_bit(name: str) -> None:
    world, base, flags = CELLS[name]
    of_ranks = run_ranks(world, _with_and_without, flags, base, timeout_s=280)
    for (plain, hostile, late), early in of_ranks:
        assert early > 0, "no bucket left during a backward"
        assert hostile == plain
        assert late == plain


def _too_early() -> list[bool]:
    """Whether a run in which every bucket leaves when the first gradient of the pass is there differs or stops."""
    flags = f"{NOISY} {CUT} {LDP2} --hybrid-layer-pattern ME* --ddp-bucket-size 3000"
    plain = trajectory(flags, STEPS)
    watch = Readiness.watch

    def hasty(self: Readiness, chunk: int) -> None:
        watch(self, chunk)
        for unit in self._units[chunk][1:]:
            unit.missing = 0

    Readiness.watch = hasty
    try:
        hostile, _ = _hostile(f"{flags} --overlap-grad-reduce", TINY)
    except RuntimeError as error:
        return ["arrived after their bucket was sent" in str(error)]
    finally:
        Readiness.watch = watch
    return [hostile != plain]


def test_a_bucket_that_leaves_too_early_is_seen() -> None:
    """The control."""
    assert all(all(seen) for seen in run_ranks(2, _too_early))
