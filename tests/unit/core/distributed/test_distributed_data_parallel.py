"""What DistributedDataParallel takes over, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, distinct_parameters
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import DEFAULT_BUCKETS, SpecStage, ToyStage, stage_specs, toy_layout


def test_a_parameter_that_two_chunks_share_is_taken_once() -> None:
    chunks = ToyStage.build_chunks(groups_for_test(), 2)
    names = [p.spec.name for p in distinct_parameters(chunks)]
    assert names.count("embedding.weight") == 1
    assert len(names) == 9


def test_several_passes_are_refused() -> None:
    groups = groups_for_test()
    layout = replace(toy_layout(groups), ldp=2)
    with pytest.raises(ValueError, match="2 logical shards on 1 data-parallel ranks"):
        DistributedDataParallel(
            [SpecStage(stage_specs(groups))], DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=layout
        )


def test_two_objects_of_one_name_are_refused() -> None:
    groups = groups_for_test()
    chunks = [SpecStage(stage_specs(groups)), SpecStage(stage_specs(groups))]
    with pytest.raises(ValueError, match="two parameters of one rank"):
        DistributedDataParallel(chunks, DEFAULT_BUCKETS, groups=groups, sums=ordered_sums(), layout=toy_layout(groups))
