"""What DistributedDataParallel takes over, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.digest.bits import same_bits
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, distinct_parameters
from megatron.core.process_groups.groups import ProcessGroups
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import DEFAULT_BUCKETS, SpecStage, ToyStage, stage_specs, toy_layout


def test_a_parameter_that_two_chunks_share_is_taken_once() -> None:
    chunks = ToyStage.build_chunks(groups_for_test(), 2)
    names = [p.spec.name for p in distinct_parameters(chunks)]
    assert names.count("embedding.weight") == 1
    assert len(names) == 17


def _two_data_parallel_ranks() -> ProcessGroups:
    groups = groups_for_test()
    return replace(groups, dp=replace(groups.dp, ranks=(0, 1)))


def test_a_data_parallel_size_that_does_not_divide_is_refused() -> None:
    groups = _two_data_parallel_ranks()
    layout = replace(toy_layout(groups), ldp=3)
    with pytest.raises(ValueError, match="3 logical shards do not divide by 2 data-parallel ranks"):
        DistributedDataParallel(
            [SpecStage(stage_specs(groups))], DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=layout
        )


def test_two_objects_of_one_name_are_refused() -> None:
    groups = groups_for_test()
    chunks = [SpecStage(stage_specs(groups)), SpecStage(stage_specs(groups))]
    with pytest.raises(ValueError, match="two parameters of one rank"):
        DistributedDataParallel(chunks, DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=toy_layout(groups))


def _final(config: DistributedDataParallelConfig, num_tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A made-up gradient of one parameter, as it was and as it is at the end of a step on one rank of two shards."""
    groups = groups_for_test()
    layout = replace(toy_layout(groups), ldp=2, block=2)
    stage = SpecStage(stage_specs(groups))
    engine = DistributedDataParallel([stage], config, groups=groups, sums=ordered_sums(), layout=layout)
    engine.zero_grad_buffer()
    param = next(p for p in stage.model_parameters() if not p.spec.stages and not p.spec.expert)
    shards = torch.randn(2, *param.shape, generator=torch.Generator().manual_seed(3))
    for shard in shards:
        param.main_grads[0].copy_(shard)
        engine.end_pass(0)
    engine.finalize_model_grads(num_tokens)
    return shards, param.main_grads[0]


@pytest.mark.parametrize(("num_tokens", "divisor"), [(None, 2), (37, 37), (0, 1)])
def test_the_sum_is_divided_by_shards_or_by_tokens(num_tokens: int | None, divisor: int) -> None:
    shards, final = _final(DEFAULT_BUCKETS, num_tokens)
    assert same_bits(final, (shards[0] + shards[1]) * (1.0 / divisor))


LEAVES = {
    "one rank": (1, {}, None, True),
    "two shards": (2, {}, None, False),
    "divided by tokens": (1, {}, 3, False),
    "divided by one token": (1, {}, 1, True),
    "rounded": (1, {"grad_reduce_in_bf16": True}, None, False),
}


@pytest.mark.parametrize("two_stage", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_gradients_that_are_left_as_they_are_are_known_before(name: str, two_stage: bool) -> None:
    ldp, config, num_tokens, leaves = LEAVES[name]
    groups = groups_for_test()
    layout = replace(toy_layout(groups), ldp=ldp, block=ldp)
    stage = SpecStage([spec for spec in stage_specs(groups) if two_stage or not spec.stages])
    engine = DistributedDataParallel(
        [stage], DistributedDataParallelConfig(**config), groups=groups, sums=ordered_sums(), layout=layout
    )
    assert any(buffer.plan.key.two_stage for buffer in engine.buffers) == two_stage
    engine.zero_grad_buffer()
    for _ in range(ldp - 1):
        engine.end_pass(0)
    for buffer in engine.buffers:
        for grad in buffer.grads:
            grad.normal_(generator=torch.Generator().manual_seed(3))
    before = [buffer.grad.clone() for buffer in engine.buffers]
    told = engine.leaves_gradients(num_tokens)
    engine.finalize_model_grads(num_tokens)
    assert told == (leaves and not two_stage)
    assert told == all(same_bits(a, buffer.grad) for a, buffer in zip(before, engine.buffers, strict=True))


def test_every_shard_is_rounded_to_bfloat16_once() -> None:
    shards, final = _final(DistributedDataParallelConfig(grad_reduce_in_bf16=True), None)
    rounded = shards.bfloat16().float()
    assert same_bits(final, (rounded[0] + rounded[1]) * 0.5)
    assert not same_bits(final, (shards[0] + shards[1]) * 0.5)
    assert not same_bits(final, (rounded[0] + rounded[1]).bfloat16().float() * 0.5)
