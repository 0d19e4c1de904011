"""Stateful generators take every seed that a run may have."""

from __future__ import annotations

import numpy as np

from megatron.core.process_groups.topology import Coordinates
from megatron.training.config.bounds import MAX_SEED
from megatron.training.config.validate import config_problems
from megatron.training.setup.seeds import generator_digest, generator_states, restore_generators, seed_generators
from tests.support.settings import given


def test_the_largest_seed_serves_every_pipeline_rank_and_the_order_of_the_samples() -> None:
    before, seen = generator_states(), set()
    try:
        for pp in range(3):
            seed_generators(MAX_SEED, Coordinates(tp=0, dp=0, pp=pp, etp=0, ep=0, edp=0))
            seen.add(generator_digest())
        np.random.RandomState(MAX_SEED)
    finally:
        restore_generators(before)
    assert len(seen) == 3


def test_a_larger_one_is_refused() -> None:
    assert config_problems(given("--seed", str(MAX_SEED)), 1) == []
    (problem,) = config_problems(given("--seed", str(MAX_SEED + 1)), 1)
    assert problem.needed == f"1 to {MAX_SEED}"
