"""What DistributedDataParallel takes over, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, distinct_parameters
from megatron.core.process_groups.groups import ProcessGroups
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import DEFAULT_BUCKETS, SpecStage, ToyStage, stage_specs, toy_layout


def test_a_parameter_that_two_chunks_share_is_taken_once() -> None:
    chunks = ToyStage.build_chunks(groups_for_test(), 2)
    names = [p.spec.name for p in distinct_parameters(chunks)]
    assert names.count("embedding.weight") == 1
    assert len(names) == 9


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
