"""Parameters and main gradients are views of flat buffers at the offsets of the plan."""

from __future__ import annotations

import pytest
import torch

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.contracts.parameter import main_grad
from megatron.core.distributed.bucket_plan import plan_buffers
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from tests.support.ranks import groups_for_test
from tests.support.toy_stage import DEFAULT_BUCKETS, make_parameter, stage_specs


def _buffers(dtype: torch.dtype = torch.float32, leaves: int = 1) -> tuple[list[ParamAndGradBuffer], dict]:
    groups = groups_for_test()
    params = {spec.name: make_parameter(spec, dtype) for spec in stage_specs(groups)}
    plans = plan_buffers([p.spec for p in params.values()], dp=1, edp=1, config=DEFAULT_BUCKETS)
    buffers = [
        ParamAndGradBuffer(plan, [params[p.spec.name] for p in plan.placements], groups.dp, leaves) for plan in plans
    ]
    return buffers, params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_stay_and_views_follow_the_plan(dtype: torch.dtype) -> None:
    before = {spec.name: make_parameter(spec, dtype).data for spec in stage_specs(groups_for_test())}
    buffers, params = _buffers(dtype)
    for buffer in buffers:
        for span in buffer.whole:
            for piece in span.pieces:
                param = params[piece.spec.name]
                shard = [s.index for s in piece.spec.shards].index(piece.shard)
                rows = param.data[shard] if piece.spec.expert else param.data
                assert torch.equal(rows.reshape(-1), buffer.weights[piece.offset : piece.stop])
                rows.view(-1)[-1] = 7.0
                assert float(buffer.weights[piece.stop - 1]) == 7.0
    for name, param in params.items():
        assert param.dtype == before[name].dtype
        assert int((param.data != before[name]).sum()) <= len(param.spec.shards)


def test_main_gradients_share_offsets_with_weights() -> None:
    buffers, params = _buffers()
    for param in params.values():
        param.main_grads[0].copy_(param.data)
    for buffer in buffers:
        assert torch.equal(buffer.grad, buffer.weights)
        buffer.zero_grad()
        assert not buffer.grad.any()


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_parameter_of_both_ends_has_a_gradient_for_each_name(leaves: int) -> None:
    _, params = _buffers(leaves=leaves)
    param = params["embedding.weight"]
    first, last = main_grad(param, "first"), main_grad(param, "last")
    assert (first.data_ptr() == last.data_ptr()) == (leaves == 1)


def test_mixed_types_in_one_buffer_are_refused() -> None:
    groups = groups_for_test()
    params = [
        make_parameter(spec, dtype)
        for spec, dtype in zip(_alike(stage_specs(groups)), (torch.float32, torch.bfloat16), strict=True)
    ]
    (plan,) = plan_buffers([p.spec for p in params], dp=1, edp=1, config=DEFAULT_BUCKETS)
    by_name = {p.spec.name: p for p in params}
    with pytest.raises(ValueError, match="have types"):
        ParamAndGradBuffer(plan, [by_name[p.spec.name] for p in plan.placements], groups.dp, 1)


def _alike(specs: list[ParamSpec]) -> list[ParamSpec]:
    return [spec for spec in specs if spec.name in ("norm.weight", "large.weight")]


def test_extremes_of_the_local_gradient_are_recorded_before_the_reduction() -> None:
    buffers, _ = _buffers()
    (buffer, *_) = buffers
    buffer.grad[3], buffer.grad[4] = 5.0, -2.0
    buffer.record_extremes(0, 0)
    assert [ends.tolist() for ends in buffer.local_extremes] == [[-2.0, 5.0]]


def test_extremes_cover_all_passes_and_not_a_number_stays() -> None:
    (buffer, *_), _ = _buffers()
    for value in (3.0, float("nan"), -7.0):
        buffer.grad[3] = value
        buffer.record_extremes(0, 0)
    assert [ends.isnan().all() for ends in buffer.local_extremes] == [True]
    buffer.zero_grad()
    assert buffer.local_extremes == []
