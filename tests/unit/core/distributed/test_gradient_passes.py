"""Passes end chunk by chunk, join one sum, and leave gradients at zero; a missing or further pass is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.digest.bits import same_bits
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, distinct_parameters
from megatron.core.distributed.gradient_passes import GradientPasses, plan_units
from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.optimizer.distrib_optimizer import Optimizer
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import DEFAULT_BUCKETS, SEED, SpecStage, ToyStage, op_table, stage_specs, toy_layout


def _engine(passes: int) -> DistributedDataParallel:
    groups = groups_for_test()
    layout = replace(toy_layout(groups), ldp=passes, block=1)
    chunks = [SpecStage(stage_specs(groups))]
    return DistributedDataParallel(chunks, DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=layout)


def test_missing_passes_are_an_error_and_so_are_too_many() -> None:
    engine = _engine(3)
    engine.zero_grad_buffer()
    engine.end_pass(0)
    with pytest.raises(RuntimeError, match="has ended 1 of 3 passes"):
        engine.finalize_model_grads()
    engine.zero_grad_buffer()
    for _ in range(3):
        engine.end_pass(0)
    with pytest.raises(RuntimeError, match="ended its 3 passes already"):
        engine.end_pass(0)


def test_main_gradients_start_every_pass_at_zero() -> None:
    engine = _engine(2)
    engine.zero_grad_buffer()
    for buffer in engine.buffers:
        for grad in buffer.grads:
            grad.fill_(-0.0).add_(3.0)
    engine.end_pass(0)
    assert all(same_bits(grad, torch.zeros_like(grad)) for buffer in engine.buffers for grad in buffer.grads)


def test_a_chunk_that_is_done_leaves_the_others_gradients_alone() -> None:
    """Buckets never hold two chunks: the second chunk still adds while the first is reduced and zeroed."""
    groups = groups_for_test()
    chunks = ToyStage.build_chunks(groups, 2)
    layout = replace(toy_layout(groups), ldp=2, block=1)
    engine = DistributedDataParallel(chunks, DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=layout)
    engine.zero_grad_buffer()
    for param in distinct_parameters(chunks):
        for grad in param.main_grads:
            grad.fill_(1.0)
    engine.end_pass(0)
    mine, other = ({p.spec.name: p.main_grads for p in chunk.model_parameters()} for chunk in chunks)
    first, last = mine.pop("embedding.weight")
    assert not first.any()
    assert bool(last.all())
    assert not any(grad.any() for grads in mine.values() for grad in grads)
    assert all(bool(grad.all()) for name, grads in other.items() if name != "embedding.weight" for grad in grads)


def test_the_sum_is_the_blocked_fold_over_passes() -> None:
    engine = _engine(1)
    layout = replace(engine.layout, ldp=5, block=2)
    units = plan_units(engine.buffers, engine.chunks)
    cpu = torch.device("cpu")
    passes = GradientPasses(engine.buffers, ordered_sums(), layout, units=units, device=cpu, num_passes=5)
    buffer = engine.buffers[0]
    terms = torch.randn(5, buffer.plan.numel, generator=torch.Generator().manual_seed(3)) * 1e3
    passes.start()
    for term in terms:
        buffer.grad.add_(term)
        passes.end(0)
    assert same_bits(buffer.grad, blocked_fold(terms, 2))
    assert not same_bits(buffer.grad, blocked_fold(terms, 5))


def test_a_bad_element_of_an_earlier_pass_is_named() -> None:
    engine = _engine(3)
    config = OptimizerConfig(lr=0.01)
    optimizer = Optimizer(engine.buffers, config, groups=groups_for_test(), ops=op_table(), seed=SEED)
    engine.zero_grad_buffer()
    params = {param.spec.name: param for param in distinct_parameters(engine.chunks)}
    params["large.weight"].main_grads[0].view(-1)[77] = float("inf")
    engine.end_pass(0)
    assert all(bool(grad.isfinite().all()) for buffer in engine.buffers for grad in buffer.grads)
    engine.end_pass(0)
    engine.finalize_model_grads()
    with pytest.raises(TrainingStoppedError, match=r"iteration 4: .* rank 0 \(large.weight\)"):
        optimizer.step(lr=0.01, weight_decay=0.0, iteration=4)
