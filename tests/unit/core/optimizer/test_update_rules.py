"""Which optimizer steps, with which moments and numbers."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.digest.bits import same_bits
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.state_kinds import MOMENTS
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import DEFAULT_BUCKETS, SEED, SpecStage, stage_specs, toy_layout


def _optimizer(kind: str) -> tuple[DistributedDataParallel, Optimizer]:
    groups = groups_for_test()
    ddp = DistributedDataParallel(
        [SpecStage(stage_specs(groups))], DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=toy_layout(groups)
    )
    ops = build_table(ALL_OPS, NumericsConfig(deterministic_mode=True), torch.device("cpu"), torch.float32)
    config = OptimizerConfig(optimizer=kind, lr=0.1, sgd_momentum=0.5, clip_grad=0.0)
    return ddp, Optimizer(ddp.buffers, config, groups=groups, ops=ops, seed=SEED)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_keeps_and_digests_its_own_moments(kind: str) -> None:
    _, optimizer = _optimizer(kind)
    kinds = ["main_params", *MOMENTS[kind]]
    assert list(dict.fromkeys(piece.kind for piece in optimizer.owned_pieces())) == kinds
    assert list(optimizer.state_digests()) == list(optimizer.local_digests()) == ["params", *kinds]


def test_sgd_steps_along_the_running_update_and_decays_matrices_alone() -> None:
    ddp, optimizer = _optimizer("sgd")
    before = {(p.name, p.shard): p.values.clone() for p in optimizer.owned_pieces() if p.kind == "main_params"}
    expected, update = dict(before), {place: torch.zeros_like(values) for place, values in before.items()}
    for step in range(2):
        for buffer in ddp.buffers:
            buffer.grad.fill_(0.25 + step)
        optimizer.step(lr=0.1, weight_decay=0.5, iteration=step + 1)
        for piece in optimizer.owned_pieces():
            if piece.kind == "main_params":
                place = (piece.name, piece.shard)
                grad = torch.full_like(expected[place], 0.25 + step)
                if piece.spec.weight_decay:
                    grad = grad + expected[place] * 0.5
                update[place] = update[place] * 0.5 + grad
                expected[place] = expected[place] - update[place] * 0.1
                assert same_bits(piece.values, expected[place])
    assert {piece.spec.weight_decay for piece in optimizer.owned_pieces()} == {True, False}
