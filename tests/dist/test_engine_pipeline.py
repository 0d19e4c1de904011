"""Pipelines of any shape give the gradients, losses and reports of one stage, bit for bit, from one micro-batch up."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from megatron.core.contracts.batch import Microbatch
from megatron.core.digest.bits import same_bits
from megatron.core.pipeline_parallel import execute
from megatron.core.pipeline_parallel.execute import PipelineInput, run_pipeline
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.toy_stage import ToyStage, build_engine, toy_batch

MICROBATCHES = (1, 2, 3, 4, 5)
Seen = dict[str, torch.Tensor]


def _given(num_microbatches: int, training: bool = True, overlap: bool = False) -> PipelineInput:
    return PipelineInput(
        iteration=1,
        shards=(0,),
        num_microbatches=num_microbatches,
        micro_batch_size=2,
        seq_length=7,
        batch=lambda shard, index: toy_batch(index),
        training=training,
        overlap=overlap,
    )


def _run(pp: int, vpp: int, overlap: bool = False, microbatches: tuple[int, ...] = MICROBATCHES) -> dict[int, Seen]:
    """Per number of micro-batches: this rank's final gradients and reports after a step, evaluation included."""
    groups = groups_for_test(pp=pp)
    out = {}
    for num_microbatches in microbatches:
        chunks = ToyStage.build_chunks(groups, vpp)
        parallel, optimizer = build_engine(chunks, groups)
        parallel.zero_grad_buffer()
        seen = {}
        for training in (True, False):
            given = _given(num_microbatches, training, overlap)
            for (_, _, microbatch), report in sorted(run_pipeline(chunks, groups, given).items()):
                for layer, value in report.per_layer["mean"].items():
                    seen[f"{training} mean {microbatch} {layer}"] = value
                if report.loss_sum is not None:
                    seen[f"{training} loss {microbatch}"] = report.loss_sum
                    seen[f"{training} tokens {microbatch}"] = report.num_tokens
        parallel.finalize_model_grads()
        params = [p for chunk in chunks for p in chunk.model_parameters()]
        seen |= {f"grad {p.spec.name}": p.main_grads[0].clone() for p in params}
        optimizer.step(lr=0.01, weight_decay=0.1, iteration=1)
        seen |= {f"weight {p.spec.name}": p.data.clone() for p in params}
        out[num_microbatches] = seen
    return out


@pytest.fixture(scope="module")
def one_stage() -> dict[int, Seen]:
    """What one stage sees."""
    return run_ranks(1, _run, 1, 1)[0]


def _assert_same(of_ranks: list[dict[int, Seen]], want: dict[int, Seen]) -> None:
    for num_microbatches in MICROBATCHES:
        keys = set()
        for of_rank in of_ranks:
            for key, value in of_rank[num_microbatches].items():
                assert same_bits(value, want[num_microbatches][key]), (num_microbatches, key)
            keys |= of_rank[num_microbatches].keys()
        assert keys == want[num_microbatches].keys()


@pytest.mark.parametrize(("pp", "vpp"), [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)])
def test_any_pipeline_equals_one_stage(pp: int, vpp: int, one_stage: dict[int, Seen]) -> None:
    _assert_same(run_ranks(pp, _run, pp, vpp), one_stage)


def _run_late(pp: int, vpp: int, seed: int) -> dict[int, Seen]:
    """With transfers beside the passes, and ranks that are late at random."""
    draw = random.Random(seed * pp + groups_for_test(pp=pp).pp.rank)
    real = execute.start_exchange

    def late(*args: Any) -> Any:
        time.sleep(draw.random() * 3e-3)
        wait = real(*args)

        def later() -> None:
            time.sleep(draw.random() * 1e-3)
            wait()

        return later

    execute.start_exchange = late
    try:
        return _run(pp, vpp, overlap=True)
    finally:
        execute.start_exchange = real


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2)])
def test_transfers_beside_the_passes_change_no_bit(pp: int, vpp: int, one_stage: dict[int, Seen]) -> None:
    _assert_same(run_ranks(pp, _run_late, pp, vpp, 1), one_stage)


def test_gradients_are_those_of_autograd(one_stage: dict[int, Seen]) -> None:
    """An independent sum: plain autograd over one model, main gradients left out."""
    groups = groups_for_test()
    (stage,) = ToyStage.build_chunks(groups, 1)
    for index in range(3):
        microbatch = Microbatch(iteration=1, shard=0, index=index, num_microbatches=3)
        loss, _ = stage.forward(toy_batch(index), None, microbatch)
        loss.backward()
    for param in stage.model_parameters():
        torch.testing.assert_close(param.grad, one_stage[3][f"grad {param.spec.name}"], rtol=1e-5, atol=1e-8)


def _descending() -> Seen:
    groups = groups_for_test()
    chunks = ToyStage.build_chunks(groups, 1)
    parallel, _ = build_engine(chunks, groups)
    parallel.zero_grad_buffer()
    given = PipelineInput(
        iteration=1,
        shards=(0,),
        num_microbatches=4,
        micro_batch_size=2,
        seq_length=7,
        batch=lambda shard, i: toy_batch(3 - i),
    )
    run_pipeline(chunks, groups, given)
    parallel.finalize_model_grads()
    return {f"grad {p.spec.name}": p.main_grads[0].clone() for c in chunks for p in c.model_parameters()}


def test_another_order_of_microbatches_gives_other_bits(one_stage: dict[int, Seen]) -> None:
    other = _descending()
    assert any(not same_bits(value, one_stage[4][key]) for key, value in other.items())
