"""The expert bias moves by exact integer counts over all ranks of a stage, the same on every layout."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.distributed.finalize_model_grads import update_expert_bias
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.toy_stage import SpecStage, build_engine, stage_specs

RATE = 1e-3
# 2**53 + 1 is no fp64 number and 257 no bf16 number: a sum in either would lose the difference.
COUNTS = torch.tensor([[2**53 + 1, 2**53, 2**53, 2**53 - 1], [257, 256, 256, 255], [0, 0, 0, 0], [1, 0, 0, 0]])


class Router:
    """As ``BalancedRouter``."""

    bias_update_rate = RATE

    def __init__(self, layer: int, counts: torch.Tensor) -> None:
        self.name = f"layers.{layer}.router"
        self.expert_bias_E = torch.tensor([0.5, -0.25, 0.0, 1e-3])
        self.token_counts_E = counts


def _share(counts: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """An uneven share; all shares add up to the counts."""
    return counts - (counts // ranks) * (ranks - 1) if rank == 0 else counts // ranks


def _moved(sizes: dict[str, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    groups = groups_for_test(**sizes)
    routers = [
        Router(layer, _share(counts, groups.tp_dp.rank, groups.tp_dp.size)) for layer, counts in enumerate(COUNTS)
    ]
    parallel, _ = build_engine([SpecStage(stage_specs(groups), routers=tuple(routers))], groups)
    parallel.finalize_model_grads()
    return [r.expert_bias_E for r in routers], [r.token_counts_E for r in routers]


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"ep": 2}), (4, {"tp": 2, "ep": 2, "etp": 1}), (4, {"pp": 2})],
)
def test_bias_follows_integer_counts_of_the_whole_stage(world: int, sizes: dict[str, int]) -> None:
    start = torch.tensor([0.5, -0.25, 0.0, 1e-3])
    signs = [[-1.0, 0.0, 0.0, 1.0], [-1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 1.0, 1.0]]
    for biases, counts in run_ranks(world, _moved, sizes):
        for bias, sign in zip(biases, signs, strict=True):
            assert same_bits(bias, start + torch.tensor(sign) * RATE)
        assert all(int(count.abs().sum()) == 0 for count in counts)


def test_counts_in_floating_point_would_lose_the_difference() -> None:
    (counts, *_) = COUNTS
    total = counts.double().sum()
    assert float(torch.sign(total / 4 - counts.double())[0]) == 0.0


def test_no_router_no_communication() -> None:
    update_expert_bias([], groups_for_test())
