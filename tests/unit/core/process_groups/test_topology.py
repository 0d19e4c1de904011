"""Rank arithmetic, at sizes no test machine has."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.process_groups.topology import AXES, LogicalLayout, default_block, plan_blocks, plan_topology


def test_groups_of_a_small_world():
    topology = plan_topology(world=8, tp=2, pp=2, ep=2, etp=1)
    assert topology.dp == 2
    assert topology.edp == 2
    assert topology.group_lists("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.group_lists("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.group_lists("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.group_lists("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.group_lists("edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.group_lists("embedding") == topology.group_lists("pp")
    assert topology.group_lists("tp_dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("tp", "pp", "ep", "etp"), [(1, 1, 1, 1), (8, 4, 16, 1), (4, 8, 8, 4), (2, 1, 64, 2)])
def test_every_axis_covers_the_world_once(tp, pp, ep, etp):
    topology = plan_topology(world=1024, tp=tp, pp=pp, ep=ep, etp=etp)
    for axis in AXES:
        members = [rank for group in topology.group_lists(axis) for rank in group]
        assert len(members) == len(set(members))
        if axis != "embedding":
            assert sorted(members) == list(range(1024))
    for rank in range(1024):
        at = topology.coordinates(rank)
        assert topology.rank(tp=at.tp, dp=at.dp, pp=at.pp) == rank


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"world": 2, "tp": 4}, "--tensor-model-parallel-size 4"),
        ({"world": 6, "pp": 4}, "--pipeline-model-parallel-size 4"),
        ({"world": 4, "ep": 3}, "--expert-model-parallel-size 3"),
    ],
)
def test_sizes_that_do_not_divide_name_the_flag(sizes, flag):
    with pytest.raises(ConfigError, match=flag):
        plan_topology(**sizes)


def test_default_block_depends_on_the_logical_layout_alone():
    assert [default_block(16, tp) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert default_block(4, 1) == 4


def test_expert_groups_and_block():
    layout = LogicalLayout(ldp=8, block=4, tp=2, ep=4, etp=1, padded_vocab_size=128, micro_batch_size=1)
    assert (layout.expert_groups, layout.expert_block) == (4, 2)


def test_shards_of_all_ranks_are_all_shards_in_pass_order():
    layout = LogicalLayout(ldp=6, block=4, tp=1, ep=1, etp=1, padded_vocab_size=128, micro_batch_size=1)
    assert [layout.shards_of(rank, 2) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert layout.shards_of(4, 6) == (4,)


def test_blocks_inside_machines_then_across():
    grid = plan_blocks([0] * 4 + [1] * 4, 2)
    assert grid.inside == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.across == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("nodes", "block"),
    [
        ([0] * 8, 4),
        ([0, 0, 1, 1], 4),
        ([0, 0, 1, 1], 1),
        ([0, 1, 0, 1], 2),
        ([0, 0, 0, 1, 1, 1], 2),
        ([0, 0, 1, 1, 2, 2], 4),
    ],
)
def test_one_stage_where_blocks_do_not_fit_machines(nodes: list[int], block: int):
    assert plan_blocks(nodes, block) is None
