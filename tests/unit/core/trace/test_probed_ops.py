"""Probed ops: the same results and the same manifest, and an event for each forward, backward and change in place."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import OpTable, build_table
from megatron.core.trace.format import Event, decode_event
from megatron.core.trace.probe import Probe
from megatron.core.trace.probed_ops import DISPATCH_OPS, configuration, probe_ops, tuned
from megatron.core.trace.recorder import Recorder


@pytest.fixture(scope="module")
def table() -> OpTable:
    return build_table(ALL_OPS, NumericsConfig(deterministic_mode=True), torch.device("cpu"), torch.float32)


class Watch:
    """A recorder that is on, and its events."""

    def __init__(self) -> None:
        self.raw = b""
        self.recorder = Recorder(self.write)
        self.probe: Probe = self.recorder
        self.recorder.begin_step()
        self.recorder.segment("forward", 1)

    def write(self, lines: bytes) -> None:
        self.raw += lines

    def events(self) -> list[Event]:
        self.recorder.flush()
        return [decode_event(line) for line in self.raw.splitlines() if line.startswith(b'{"e"')]


def test_manifest_and_source_hashes_stay(table: OpTable):
    assert probe_ops(table, Watch().recorder).manifest() == table.manifest()


def test_forward_and_backward_are_events_and_change_nothing(table: OpTable):
    watch = Watch()
    grads = []
    for ops in (table, probe_ops(table, watch.recorder)):
        x, weight = torch.linspace(-1, 1, 24).view(3, 2, 4).requires_grad_(), torch.ones(4, requires_grad=True)
        out = ops["rms_norm"](x, weight, 1e-5)
        out.square().sum().backward()
        grads.append((out.detach(), x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    forward, backward = watch.events()
    assert (forward.kind, forward.name, forward.meta["variant"]) == (
        "kernel",
        "rms_norm",
        table.chosen["rms_norm"].name,
    )
    assert [t.label for t in forward.ins] == ["args.0", "args.1"]
    assert backward.name == "rms_norm.backward"
    assert len(backward.outs) == 2


def test_op_that_works_in_place_shows_what_it_left(table: OpTable):
    watch = Watch()
    main_grad = torch.zeros(2, 3)
    probe_ops(table, watch.recorder)["linear_grad"](main_grad, torch.ones(4, 2), torch.ones(4, 3))
    (event,) = watch.events()
    assert event.ins[0].digest != event.outs[0].digest
    assert event.outs[0].label == "result.0"


def test_memory_that_only_takes_a_result_is_not_read(table: OpTable):
    digests = []
    for garbage in (1.0, 2.0):
        watch = Watch()
        probe_ops(table, watch.recorder)["blocked_fold"](torch.ones(2, 5), 2, torch.full((5,), garbage))
        digests.append([(t.label, t.digest) for event in watch.events() for t in (*event.ins, *event.outs)])
    assert digests[0] == digests[1]
    assert [label for label, _ in digests[0]] == ["args.0", "result"]


def test_only_the_named_ops_are_probed(table: OpTable):
    probed = probe_ops(table, Watch().recorder, DISPATCH_OPS)
    assert {op for op in table.chosen if probed.chosen[op] is not table.chosen[op]} == set(DISPATCH_OPS)


def test_nothing_is_recorded_outside_a_step(table: OpTable):
    watch = Watch()
    watch.recorder.active = False
    probe_ops(table, watch.recorder)["linear_grad"](torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    assert watch.events() == []


def test_choice_of_a_tuner_is_read(table: OpTable, monkeypatch: pytest.MonkeyPatch):
    variant, kernel = table.chosen["rms_norm"], SimpleNamespace()
    monkeypatch.setattr(sys.modules[variant.fn.__module__], "planted_kernel", kernel, raising=False)
    kernels = tuned(variant)
    assert configuration(kernels) == {}
    kernel.best_config = "BLOCK: 64"
    assert configuration(kernels) == {"planted_kernel": "BLOCK: 64"}
