"""--check-weight-hash-across-dp-replicas-interval: replicas that drift stop every rank, by rank and tensor."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.training.loop.build import Run
from tests.support.ranks import run_ranks
from tests.support.training import build_here, master_of

# The first test of a world trains for all of them.
pytestmark = pytest.mark.timeout(400)
LIMIT_S = 360.0
FLAGS = "--hybrid-layer-pattern ME*- --global-batch-size 4 --check-weight-hash-across-dp-replicas-interval 2 --bf16"
NORM, EXPERT = "decoder.final_norm.weight", "decoder.layers.1.mlp.experts.linear_fc1.weight"


def _flip_last_bit(values: torch.Tensor) -> None:
    flat = values.view(-1)[:1]
    flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()]).bitwise_xor_(1)


def _disturb(run: Run, what: str) -> None:
    if what == "masters":
        _flip_last_bit(master_of(run, NORM))
        return
    params = {param.spec.name: param for chunk in run.chunks for param in chunk.model_parameters()}
    _flip_last_bit(params[what].data)


def _steps(flags: str, what: str | None, bad_rank: int) -> list[str]:
    """What each of four steps said; the drift happens after the first."""
    run = build_here(f"{FLAGS} {flags}")
    reader, consumed, said = run.reader(run.splits.train), 0, []
    for iteration in range(1, 5):
        try:
            consumed = run.step.run(reader, iteration, consumed).consumed_samples
        except TrainingStoppedError as error:
            return [*said, str(error)]
        said.append("")
        if iteration == 1 and what is not None and run.groups.world.rank == bad_rank:
            _disturb(run, what)
    return said


def _all_steps(cases: list[tuple[str, str | None, int]]) -> list[list[str]]:
    return [_steps(*case) for case in cases]


@pytest.fixture(scope="module")
def four_ranks() -> list[list[list[str]]]:
    """By rank and case; the ranks are started once."""
    cases = [
        ("", None, 0),
        ("--use-distributed-optimizer", NORM, 2),
        ("--expert-model-parallel-size 2 --use-distributed-optimizer", EXPERT, 3),
        ("", "masters", 0),
    ]
    return run_ranks(4, _all_steps, cases, timeout_s=LIMIT_S)


def test_replicas_that_agree_go_on(four_ranks: list[list[list[str]]]) -> None:
    assert all(of_rank[0] == [""] * 4 for of_rank in four_ranks)


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (1, f"iteration 2: replicas have drifted apart: rank 2 (weights of {NORM}, shard 0);"),
        (3, f"iteration 2: replicas have drifted apart: rank 0 (main_params of {NORM}, shard 0);"),
    ],
)
def test_a_replica_that_drifts_stops_every_rank_and_is_named(
    four_ranks: list[list[list[str]]], case: int, found: str
) -> None:
    for of_rank in four_ranks:
        assert of_rank[case][0] == ""
        assert of_rank[case][1].startswith(found), of_rank[case]
        assert len(of_rank[case]) == 2


def test_experts_are_compared_with_their_own_replicas(four_ranks: list[list[list[str]]]) -> None:
    """Two replicas that differ: the first counts as right."""
    for of_rank in four_ranks:
        assert "rank 3 (weights of decoder.layers.1" in of_rank[2][1], of_rank[2]
