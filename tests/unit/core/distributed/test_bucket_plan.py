"""Bucket plans at the sizes of large runs: alignment, order, coverage, and equal cuts, without any process."""

from __future__ import annotations

import pytest

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.contracts.flat_buffer import Piece
from megatron.core.contracts.param_spec import (
    SHARD_ALIGNMENT,
    Initial,
    ParamSpec,
    cut_shard,
    expert_shard,
    replicated_shard,
)
from megatron.core.distributed.bucket_plan import BufferPlan, plan_bucket_size, plan_buffers, plan_pieces, plan_spans

ZERO = Initial(kind="constant", a=0.0)


def dense(name: str, shape: tuple[int, ...], tp: int = 1, **facts: object) -> ParamSpec:
    shard = cut_shard(shape, 0, 0, tp) if tp > 1 else replicated_shard(shape)
    return ParamSpec(name=name, shape=shape, num_shards=tp, shards=(shard,), initial=ZERO, **facts)


def experts(name: str, shape: tuple[int, int, int], local: range, etp: int = 1) -> ParamSpec:
    shards = tuple(expert_shard(shape, e, 1, 0, etp) for e in local)
    return ParamSpec(name=name, shape=shape, num_shards=shape[0] * etp, shards=shards, initial=ZERO, expert=True)


def large_model(layers: int = 24) -> list[ParamSpec]:
    """A stage of a hybrid MoE model: odd vectors, large matrices, 8 of 128 experts on this rank, TP 4."""
    specs = [dense("embedding.weight", (131072, 2688), tp=4, stages=("first", "last"))]
    for i in range(layers):
        specs += [
            dense(f"layers.{i}.norm.weight", (2688,), tp_replicated=True, tp_partial=True, weight_decay=False),
            dense(f"layers.{i}.in_proj.weight", (10304, 2688), tp=4),
            dense(f"layers.{i}.A_log", (64,), tp=4, fp32=True, weight_decay=False),
            dense(f"layers.{i}.router.weight", (128, 2688), tp_replicated=True, tp_partial=True),
            experts(f"layers.{i}.experts.fc1.weight", (128, 1856, 2688), range(40, 48)),
        ]
    return specs


def by_owner(plan: BufferPlan) -> list[Piece]:
    return [piece for rank in range(plan.ranks) for span in plan_spans(plan, rank, plan.ranks) for piece in span.pieces]


@pytest.mark.parametrize(("dp", "edp", "bucket_size"), [(1, 1, None), (3, 3, 10_000_000), (256, 16, None)])
def test_every_element_of_a_large_model_has_one_owner(dp: int, edp: int, bucket_size: int | None) -> None:
    specs = large_model()
    config = DistributedDataParallelConfig(ddp_bucket_size=bucket_size)
    plans = plan_buffers(specs, dp=dp, edp=edp, config=config)
    owned: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for plan in plans:
        for piece in by_owner(plan):
            owned.setdefault((piece.spec.name, piece.shard), []).append((piece.start, piece.length))
    for spec in specs:
        for shard in spec.shards:
            position = 0
            for start, length in sorted(owned.pop((spec.name, shard.index))):
                assert start == position
                assert start % SHARD_ALIGNMENT == 0
                position += length
            assert position == shard.numel
    assert not owned


@pytest.mark.parametrize(("dp", "edp", "bucket_size"), [(1, 1, 1), (3, 3, 50_000_000), (1024, 64, None)])
def test_alignment_and_equal_cuts(dp: int, edp: int, bucket_size: int | None) -> None:
    config = DistributedDataParallelConfig(ddp_bucket_size=bucket_size)
    for plan in plan_buffers(large_model(), dp=dp, edp=edp, config=config):
        assert plan.ranks == (edp if plan.key.expert else dp)
        assert all(end % (SHARD_ALIGNMENT * plan.ranks) == 0 for end in plan.bucket_ends)
        assert all(placement.offset % SHARD_ALIGNMENT == 0 for placement in plan.placements)
        spans = [plan_spans(plan, rank, plan.ranks) for rank in range(plan.ranks)]
        for bucket, (start, stop) in enumerate(plan.buckets):
            cuts = [spans[rank][bucket] for rank in range(plan.ranks)]
            assert [cut.start for cut in cuts] + [stop] == [start] + [cut.stop for cut in cuts]
            assert len({cut.length for cut in cuts}) == 1
            inside = [p for p in plan.placements if start <= p.offset < stop]
            assert inside, "a bucket without a parameter"
            assert all(p.offset + p.spec.buffer_numel <= stop for p in inside)


def test_reverse_registration_order_and_one_buffer_per_kind() -> None:
    plans = plan_buffers(large_model(2), dp=2, edp=2, config=DistributedDataParallelConfig())
    names = [[p.spec.name for p in plan.placements] for plan in plans]
    assert names == [
        ["layers.1.in_proj.weight", "layers.0.in_proj.weight"],
        ["layers.1.router.weight", "layers.1.norm.weight", "layers.0.router.weight", "layers.0.norm.weight"],
        ["layers.1.A_log", "layers.0.A_log"],
        ["layers.1.experts.fc1.weight", "layers.0.experts.fc1.weight"],
        ["embedding.weight"],
    ]


def test_a_parameter_of_both_ends_is_cut_alike_whatever_else_a_stage_holds() -> None:
    shared = dense("embedding.weight", (1000, 9), stages=("first", "last"))
    config = DistributedDataParallelConfig()
    first = plan_buffers([shared, dense("a", (77,))], dp=3, edp=3, config=config)
    last = plan_buffers([dense("b", (5000, 3)), dense("c", (4,)), shared], dp=3, edp=3, config=config)
    assert first[-1] == last[-1]
    assert first[0] != last[0]


def test_bucket_sizes_move_borders_but_not_the_order() -> None:
    specs = large_model()
    one, many = (
        plan_buffers(specs, dp=8, edp=8, config=config)[0]
        for config in (
            DistributedDataParallelConfig(ddp_num_buckets=1),
            DistributedDataParallelConfig(ddp_num_buckets=1000),
        )
    )
    assert (len(one.buckets), len(many.buckets)) == (1, 24)
    assert [p.spec for p in one.placements] == [p.spec for p in many.placements]


def test_tiny_model_leaves_ranks_with_padding_only() -> None:
    (plan,) = plan_buffers([dense("a", (8,)), dense("b", (8, 8))], dp=8, edp=8, config=DistributedDataParallelConfig())
    lengths = [sum(p.length for span in plan_spans(plan, r, 8) for p in span.pieces) for r in range(8)]
    assert lengths == [64, 8, 0, 0, 0, 0, 0, 0]
    assert plan.numel == 8 * SHARD_ALIGNMENT


def test_pieces_of_any_range() -> None:
    (plan,) = plan_buffers([experts("w", (4, 30, 50), range(4))], dp=1, edp=1, config=DistributedDataParallelConfig())
    pieces = plan_pieces(plan, 1024, 4096)
    assert [(p.shard, p.start, p.length, p.offset) for p in pieces] == [(0, 1024, 476, 1024), (1, 0, 1500, 2048)]
    assert plan_pieces(plan, 1536, 2048) == ()


def test_default_bucket_size_follows_megatron() -> None:
    assert plan_bucket_size(DistributedDataParallelConfig(), 8, 10**9) == 40_000_000
    assert plan_bucket_size(DistributedDataParallelConfig(), 64, 10**9) == 64_000_000
    assert plan_bucket_size(DistributedDataParallelConfig(ddp_num_buckets=10), 64, 10**9) == 10**8


def test_contradictions_are_refused() -> None:
    twice = [dense("a", (3,)), dense("a", (4,))]
    with pytest.raises(ValueError, match="called a"):
        plan_buffers(twice, dp=1, edp=1, config=DistributedDataParallelConfig())
    partial = ParamSpec(
        name="w",
        shape=(1, 2, 2),
        num_shards=1,
        shards=(expert_shard((1, 2, 2), 0, 1, 0, 1),),
        initial=ZERO,
        expert=True,
        tp_partial=True,
    )
    with pytest.raises(ValueError, match="routed expert"):
        plan_buffers([partial], dp=1, edp=1, config=DistributedDataParallelConfig())
