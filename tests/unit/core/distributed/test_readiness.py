"""Buckets leave in one order as soon as their gradients are complete; a gradient that comes later is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.contracts.batch import Microbatch
from megatron.core.contracts.parameter import ModelParameter, accumulate_grad, use_in_fp32
from megatron.core.digest.bits import same_bits
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.gradient_passes import plan_units
from megatron.core.distributed.readiness import LateGradientError, Readiness, Unit
from megatron.core.tensor_parallel.recompute import compute_again
from tests.support.ranks import groups_for_test, ordered_sums
from tests.support.toy_stage import ToyStage, make_parameter, toy_batch, toy_layout

NAMES = ("a", "b", "c", "d")
EACH = DistributedDataParallelConfig(ddp_bucket_size=1, overlap_grad_reduce=True)


class Line:
    """``x * a * b * c * d``: gradients come from the last to the first."""

    is_first = is_last = True

    def __init__(self) -> None:
        self.params = {name: make_parameter(ToyStage._spec(name, 1)) for name in NAMES}

    def model_parameters(self) -> Iterator[ModelParameter]:
        yield from self.params.values()

    def balanced_routers(self) -> Iterator:
        yield from ()

    def loss(self, order: str = "abcd") -> torch.Tensor:
        x = torch.ones(ToyStage.hidden, requires_grad=True)
        for name in order:
            x = x * use_in_fp32(self.params[name])
        return x.sum()


def _watched(stage: Line) -> tuple[Readiness, list[str]]:
    """A chunk whose parameters have a bucket each, and what of them was sent."""
    groups, sent = groups_for_test(), []
    engine = DistributedDataParallel([stage], EACH, groups=groups, sums=ordered_sums(), layout=toy_layout(groups))
    units = plan_units(engine.buffers, [stage])
    return Readiness(units, lambda _, unit: sent.append(_name(unit))), sent


def _name(unit: Unit) -> str:
    return "".join(param.spec.name for param in unit.params)


def _backward(readiness: Readiness, loss: torch.Tensor) -> None:
    readiness.watch(0)
    loss.backward()


def test_after_the_first_backward_buckets_leave_as_they_are_complete() -> None:
    stage = Line()
    readiness, sent = _watched(stage)
    _backward(readiness, stage.loss())
    assert sent == [], "nothing is known of the first backward"
    readiness.end(0)
    assert sent == list("dcba")
    sent.clear()
    seen_at: dict[str, str] = {}

    def note(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: seen_at.__setitem__(name, "".join(sent))

    x = torch.ones(ToyStage.hidden, requires_grad=True)
    for name in NAMES:
        x = x * use_in_fp32(stage.params[name])
        x.register_hook(note(name))
    _backward(readiness, x.sum())
    # When the gradient of a product comes, everything behind it has left, but for the product itself.
    assert sent == list("dcba")
    assert seen_at["a"] in ("dc", "dcb")
    assert seen_at["d"] == ""


def test_a_bucket_waits_for_the_ones_before_it() -> None:
    stage = Line()
    readiness, sent = _watched(stage)
    order = "dcba"
    _backward(readiness, stage.loss(order))
    readiness.end(0)
    sent.clear()
    counts = []
    x = torch.ones(ToyStage.hidden, requires_grad=True)
    for name in order:
        x = x * use_in_fp32(stage.params[name])
        x.register_hook(lambda _: counts.append(len(sent)))
    _backward(readiness, x.sum())
    # a is complete first and d last, and d goes first.
    assert set(counts) == {0}
    assert sent == list("dcba")


def test_parameters_without_use_hold_nobody_up_and_recomputation_counts() -> None:
    stage = Line()
    readiness, sent = _watched(stage)

    def loss() -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            return x * use_in_fp32(stage.params["d"])

        x = torch.ones(ToyStage.hidden, requires_grad=True) * use_in_fp32(stage.params["a"])
        return compute_again(part, compute_again(part, x) * use_in_fp32(stage.params["b"])).sum()

    for early in (False, True, True):
        sent.clear()
        _backward(readiness, loss())
        assert bool(sent) == early
        readiness.end(0)
        assert sent == list("dcba")


def test_a_use_too_many_after_the_bucket_left_is_named() -> None:
    stage = Line()
    readiness, _ = _watched(stage)
    _backward(readiness, stage.loss())
    readiness.end(0)
    readiness.watch(0)

    def again(x: torch.Tensor) -> torch.Tensor:
        return x * use_in_fp32(stage.params["d"])

    late = compute_again(again, torch.ones(ToyStage.hidden, requires_grad=True))
    for name in NAMES:
        late = late * use_in_fp32(stage.params[name])
    with pytest.raises(LateGradientError, match="arrived after their bucket was sent .*: d;"):
        late.sum().backward()


def _engine(overlap: bool, passes: int = 1) -> tuple[ToyStage, DistributedDataParallel]:
    groups = groups_for_test()
    (stage,) = ToyStage.build_chunks(groups, 1)
    layout = replace(toy_layout(groups), ldp=passes, block=1)
    config = replace(EACH, overlap_grad_reduce=overlap)
    return stage, DistributedDataParallel([stage], config, groups=groups, sums=ordered_sums(), layout=layout)


def _step(stage: ToyStage, engine: DistributedDataParallel, passes: int) -> dict[str, torch.Tensor]:

    engine.zero_grad_buffer()
    for number in range(passes):
        for index in range(2):
            at = Microbatch(iteration=1, shard=number, index=index, num_microbatches=2)
            loss, _ = stage.forward(toy_batch(2 * number + index), None, at)
            engine.begin_backward(0, index == 1)
            loss.backward()
        engine.end_pass(0)
    engine.finalize_model_grads()
    return {param.spec.name: param.main_grads[0].clone() for param in stage.model_parameters()}


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_the_same_with_and_without(passes: int) -> None:
    plain, overlapped = (_engine(on, passes) for on in (False, True))
    for _ in range(2):
        want, got = _step(*plain, passes), _step(*overlapped, passes)
        assert want.keys() == got.keys()
        assert all(same_bits(want[name], got[name]) for name in want)


def test_a_main_gradient_written_after_it_left_is_named() -> None:
    stage, engine = _engine(True)
    _step(stage, engine, 1)
    late = stage.weights[stage.layers - 1]
    first = stage.weights[0]
    original = first.main_grads

    class Meddling:
        """Writes another parameter's main gradient when the first layer's comes."""

        def add_(self, grad: torch.Tensor) -> None:
            original[0].add_(grad)
            late.main_grads[0].add_(1.0)

    first.main_grads = (Meddling(),)
    with pytest.raises(LateGradientError, match=rf": {late.spec.name};"):
        _step(stage, engine, 1)


def test_accumulating_outside_of_autograd_before_the_bucket_left_is_fine() -> None:
    stage, engine = _engine(True)
    want = _step(stage, engine, 1)
    engine.zero_grad_buffer()
    engine.begin_backward(0, False)
    for param in stage.model_parameters():
        for where in param.spec.stages or ("",):
            accumulate_grad(param, torch.ones_like(param), where)
    engine.begin_backward(0, True)
    engine.end_pass(0)
    engine.finalize_model_grads()
    assert all(not same_bits(param.main_grads[0], want[param.spec.name]) for param in stage.model_parameters())
