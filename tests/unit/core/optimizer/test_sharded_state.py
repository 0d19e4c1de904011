"""Masters are the exact draws, working weights their cast; pieces are views of the state."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.optimizer import sharded_state
from megatron.core.optimizer.sharded_state import ShardedState
from megatron.core.rng.initial_values import draw_parameter
from tests.support.ranks import groups_for_test
from tests.support.toy_stage import SEED, SpecStage, build_engine, stage_specs


def _engine(dtype: torch.dtype):
    groups = groups_for_test()
    stage = SpecStage(stage_specs(groups), dtype)
    parallel, optimizer = build_engine([stage], groups)
    return stage, parallel, optimizer


def test_masters_keep_what_bfloat16_loses() -> None:
    stage, _, optimizer = _engine(torch.bfloat16)
    pieces = {(p.name, p.shard): p.values for p in optimizer.owned_pieces() if p.kind == "main_params"}
    for param in stage.params:
        drawn = torch.empty(param.spec.local_shape)
        draw_parameter(param.spec, SEED, drawn)
        rows = drawn.view(len(param.spec.shards), -1)
        for row, shard in zip(rows, param.spec.shards, strict=True):
            assert same_bits(pieces.pop((param.spec.name, shard.index)), row)
        assert same_bits(param.data.contiguous(), drawn.to(param.dtype))
    assert not pieces


@pytest.mark.parametrize("distributed", [False, True])
def test_masters_of_another_seed_are_refused_wherever_they_differ(distributed: bool, monkeypatch) -> None:
    monkeypatch.setattr(sharded_state, "_AT_ONCE", 64)
    _, parallel, _ = _engine(torch.bfloat16)
    for buffer in parallel.buffers:
        ShardedState(buffer, distributed, SEED)
        last = buffer.whole[-1].pieces[-1]
        buffer.weights[last.stop - 1] += 1.0
        with pytest.raises(ValueError, match=f"{last.spec.name} does not hold"):
            ShardedState(buffer, distributed, SEED)


def test_working_weights_follow_filled_masters() -> None:
    stage, _, optimizer = _engine(torch.bfloat16)
    for piece in optimizer.owned_pieces():
        piece.values.fill_({"main_params": 1.0 + 2.0**-9, "exp_avg": 2.0, "exp_avg_sq": 3.0}[piece.kind])
    optimizer.write_working_weights()
    for param in stage.params:
        want = 1.0 + 2.0**-9 if param.spec.fp32 else 1.0
        assert bool((param.data == want).all())
    assert all(bool((state.view(state.tensors()["exp_avg"], 0, 1) == 2.0).all()) for state in optimizer.states)


def test_owned_and_whole_state_of_one_rank_are_the_same() -> None:
    _, parallel, _ = _engine(torch.float32)
    for buffer in parallel.buffers:
        whole, owned = (ShardedState(buffer, distributed, SEED) for distributed in (False, True))
        assert same_bits(whole.main_params, owned.main_params)
        assert list(whole.held()) == list(owned.held())
