"""Weights on their way are waited for by the modules that use them; a use past every wait is refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.process_groups.collectives import Waiting
from megatron.core.process_groups.groups import Group
from megatron.training.loop.build import Run
from tests.support.training import TIED, TINY, build_here

FLAGS = (
    "--seq-length 32 --max-position-embeddings 32 --global-batch-size 2 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000 --hybrid-layer-pattern "
)
CASES = pytest.mark.parametrize(("base", "pattern"), [(TINY, "ME*-"), (TIED, "M*/*E")])


def _watched(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a gather is on its way until it is waited for; the addresses of those that were."""
    waited: list[int] = []

    def start(group: Group, whole: torch.Tensor) -> Waiting:
        return lambda: waited.append(whole.data_ptr())

    monkeypatch.setattr(param_and_grad_buffer, "start_all_gather", start)
    return waited


@CASES
def test_every_bucket_is_waited_for_before_its_weights_are_used(
    base: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_here(FLAGS + pattern, base)
    reader, ddp = run.reader(run.splits.train), run.step.ddp
    run.step.run(reader, 1, 0)
    waited = _watched(run, monkeypatch)
    ddp.gather_weights()
    starts = {
        param.data_ptr(): buffer._weights[start:].data_ptr()
        for buffer in ddp.buffers
        for bucket, (start, _) in enumerate(buffer.plan.buckets)
        for param in buffer.params_in(bucket)
    }
    early: list[str] = []
    for name, module in run.chunks[0].named_modules():
        for param in module.parameters(recurse=False):
            module.register_forward_pre_hook(partial(_note, name, starts[param.data_ptr()], waited, early))
    assert not waited
    run.step.run(reader, 2, 2)
    assert early == []
    assert len(waited) == len(set(waited)) == sum(len(buffer.plan.buckets) for buffer in ddp.buffers)
    # The table comes first: both ends wait for what they share, and the first layers before the last.
    order = [at for at in waited if at in starts.values()]
    first, last = (
        starts[p.data_ptr()] for p in (run.chunks[0].embedding.word_embeddings.weight, _final_norm(run).weight)
    )
    assert order.index(first) < order.index(last)


def _note(name: str, at: int, waited: list[int], early: list[str], *_: object) -> None:
    if at not in waited:
        early.append(name)


def _final_norm(run: Run) -> torch.nn.Module:
    return run.chunks[0].decoder.final_norm


def test_whoever_asks_for_all_weights_gets_them_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_here(FLAGS + "M*")
    waited = _watched(run, monkeypatch)
    run.step.ddp.gather_weights()
    run.step.optimizer.state_digests()
    everything = sum(len(buffer.plan.buckets) for buffer in run.step.ddp.buffers)
    assert len(waited) == everything
    run.step.ddp.gather_weights()
    run.step.evaluate(run.reader(run.splits.train), 1, 1, 0)
    assert len(waited) == 2 * everything


def test_a_weight_used_without_its_module_is_refused_by_name() -> None:
    """The control: nothing would wait for this weight."""
    run = build_here(FLAGS + "M*")
    norm = _final_norm(run)
    del run.chunks[0].decoder._modules["final_norm"]
    run.chunks[0].decoder.__dict__["final_norm"] = norm.forward
    with pytest.raises(RuntimeError, match=r"without a call of the module .*: decoder.final_norm.weight;"):
        run.step.run(run.reader(run.splits.train), 1, 0)


def test_without_the_flag_nothing_is_on_its_way() -> None:
    run = build_here(FLAGS.replace("--overlap-param-gather", "") + "M*")
    assert not any(isinstance(value, ParamGather) for value in vars(run.step.ddp).values())
    assert not any(module._forward_pre_hooks for module in run.chunks[0].modules())
