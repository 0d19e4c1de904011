"""Copies of a parameter stay equal bit for bit: over tensor-parallel, data-parallel, expert-data-parallel ranks."""

from __future__ import annotations

import pytest

from megatron.core.digest.bits import sha256_of
from tests.support.ranks import run_ranks
from tests.support.training import build_here

STEPS = 10
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "TP2": (2, "--tensor-model-parallel-size 2", "M*-"),
    "TP2-SP": (2, f"{SP} --expert-tensor-parallel-size 1", "ME*-"),
    "DP2-sharded": (2, "--use-distributed-optimizer", "ME*-"),
    "DP2-whole": (2, "", "ME*-"),
    "TP2-DP2-EP2": (4, f"{SP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2", "ME*-"),
}

Copies = dict[tuple[str, int], str]


def _copies_after_each_step(flags: str, drift: bool) -> list[Copies]:
    """Digest of every parameter this rank holds, by name and first logical shard, after each step."""
    run = build_here(f"{flags} --lr 1e-2 --train-iters {STEPS} --clip-grad 0.01")
    reader, consumed, seen = run.reader(run.splits.train), 0, []
    for iteration in range(1, STEPS + 1):
        consumed = run.step.run(reader, iteration, consumed).consumed_samples
        params = [param for chunk in run.chunks for param in chunk.model_parameters()]
        if drift and iteration == 3 and run.groups.world.rank == 1:
            norm = next(p for p in params if p.spec.name == "decoder.final_norm.weight")
            norm.data[0] += 1e-7
        seen.append({(p.spec.name, p.spec.shards[0].index): sha256_of(p.data) for p in params})
    return seen


def _first_difference(ranks: list[list[Copies]]) -> tuple[int, str] | None:
    for iteration in range(STEPS):
        first: Copies = {}
        for rank in ranks:
            for place, digest in rank[iteration].items():
                if first.setdefault(place, digest) != digest:
                    return iteration + 1, place[0]
    return None


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_stay_equal(name: str) -> None:
    world, flags, pattern = LAYOUTS[name]
    ranks = run_ranks(world, _copies_after_each_step, f"{flags} --hybrid-layer-pattern '{pattern}'", False)
    assert _first_difference(ranks) is None


def test_a_copy_that_drifts_is_seen() -> None:
    world, flags, pattern = LAYOUTS["DP2-whole"]
    ranks = run_ranks(world, _copies_after_each_step, f"{flags} --hybrid-layer-pattern '{pattern}'", True)
    assert _first_difference(ranks) == (3, "decoder.final_norm.weight")
