"""Where an event belongs: scopes and phases of forwards, backwards and of what a backward computes again; hooks that
change no bit."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

from megatron.core.tensor_parallel.recompute import compute_again, keeping
from megatron.core.trace.format import Event
from megatron.core.trace.module_hooks import probe_modules
from megatron.core.trace.op_mode import OpMode
from megatron.core.trace.reader import Note
from megatron.core.trace.recorder import Recorder
from tests.support.recording import Block, Lines, recorded


def chunk_events(*, ops: bool, recompute: bool = False, parts: bool = True) -> list[Event]:
    torch.manual_seed(1)
    chunk = torch.nn.Sequential(Block())

    def work(recorder: Recorder) -> None:
        probe_modules(chunk, recorder, parts=parts)
        x = torch.ones(2, 4, requires_grad=True)
        y = compute_again(chunk, x) if recompute else chunk(x)
        recorder.segment("backward", 1)
        y.sum().backward()

    return recorded(work, ops=ops)


def test_modules_inner_first_in_both_directions():
    events = chunk_events(ops=False)
    seen = [(e.scope, e.name, e.phase) for e in events]
    assert seen == [
        ("0.inner", "forward", "forward"),
        ("0", "forward", "forward"),
        ("0.inner", "backward", "backward"),
        ("0", "backward", "backward"),
    ]
    assert [t.label for t in events[3].ins] == ["grad_output"]
    assert [t.label for t in events[3].outs] == ["grad_input.0.0"]


def test_without_parts_a_module_of_nothing_but_parts_is_one():
    assert [e.scope for e in chunk_events(ops=False, parts=False)] == ["0", "0"]


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.split(2)


def test_every_output_gets_its_own_gradient_and_one_without_a_gradient_is_left_out():
    torch.manual_seed(2)
    chunk, ends = torch.nn.ModuleDict({"halves": Halves()}), torch.randn(2)

    def work(recorder: Recorder) -> None:
        probe_modules(chunk, recorder)
        for take in ((0, 1), (1,)):
            parts = chunk["halves"](torch.ones(4, requires_grad=True))
            sum((parts[n] * ends[n]).sum() for n in take).backward()

    both, second = (event for event in recorded(work, ops=False) if event.name == "backward")
    assert [t.label for t in both.ins] == ["grad_output.0", "grad_output.1"]
    assert both.ins[0].digest != both.ins[1].digest
    assert [(t.label, t.digest) for t in second.ins] == [("grad_output.1", both.ins[1].digest)]
    assert [t.label for t in both.outs] == [t.label for t in second.outs] == ["grad_input.0.0"]


def test_probes_of_two_recorders_come_off_again():
    chunk, lines = torch.nn.Sequential(Block()), (Lines(), Lines())
    before = {name: dict(vars(module)) for name, module in chunk.named_modules()}
    recorders = [Recorder(each) for each in lines]
    probes = [probe_modules(chunk, recorder) for recorder in recorders]
    for recorder in recorders:
        recorder.begin_step()
        recorder.segment("forward", 1)
    chunk(torch.ones(2, 4))
    for probed in probes[1]:
        probed.remove()
    chunk(torch.ones(2, 4))
    for recorder in recorders:
        recorder.end_step(1, complete=True)
    assert [len(each.events()) for each in lines] == [4, 2]
    for probed in probes[0]:
        probed.remove()
    assert {name: dict(vars(module)) for name, module in chunk.named_modules()} == before


def test_operations_of_a_backward_carry_the_scope_of_their_forward():
    scopes = {e.scope for e in chunk_events(ops=True) if e.phase == "backward" and e.kind == "op"}
    assert {"0|TanhBackward0", "0.inner|AddmmBackward0"} <= scopes


def test_recomputed_forward_is_marked():
    modules = [e for e in chunk_events(ops=False, recompute=True) if e.kind == "module"]
    assert [(e.scope, e.name, e.phase) for e in modules] == [
        ("0.inner", "forward", "forward"),
        ("0", "forward", "forward"),
        ("0.inner", "forward", "recompute"),
        ("0", "forward", "recompute"),
        ("0.inner", "backward", "backward"),
        ("0", "backward", "backward"),
    ]


class Summed(torch.autograd.Function):
    """Twice its input; in both directions a sum that is made of a collective."""

    @staticmethod
    def forward(ctx, recorder: Recorder, x: torch.Tensor) -> torch.Tensor:
        ctx.recorder = recorder
        return summed(recorder, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, summed(ctx.recorder, grad)


def summed(recorder: Recorder, x: torch.Tensor) -> torch.Tensor:
    """A sum with a collective inside."""

    def exchange() -> torch.Tensor:
        return recorder.around("collective", "exchange", lambda: x + x, ins=x)

    return recorder.around("sum", "all_reduce", exchange, ins=x)


def layer(recorder: Recorder, name: str, x: torch.Tensor) -> torch.Tensor:
    with recorder.scopes.inside(name):
        return Summed.apply(recorder, x.sin())


def several_layers(where: str, *, ops: bool = False) -> list[Event]:
    """A plain layer, two that are computed again together, one that is computed again inside of that, and a norm that
    is made again where it is wanted; the backward ``here``, or in another ``thread``, as torch has it on ``cuda``."""
    in_a_thread, device = where == "thread", "cuda" if where == "cuda" else "cpu"

    def work(recorder: Recorder) -> None:
        def both(x: torch.Tensor) -> torch.Tensor:
            inner = layer(recorder, "layer1", x)
            with recorder.scopes.inside("layer2"):
                return compute_again(lambda y: layer(recorder, "layer2.inner", y.cos()), inner).cos()

        def norm(x: torch.Tensor) -> torch.Tensor:
            return recorder.around("collective", "gather", lambda: x.exp(), ins=x)

        x = torch.linspace(0.0, 1.0, 3, device=device, requires_grad=True)
        plain = layer(recorder, "layer0", x)
        again = compute_again(both, plain)
        with recorder.scopes.inside("layer3"):
            source = norm(again)
            with keeping(lambda: norm(again), source):
                y = source.square()
        recorder.segment("backward", 1)
        mode = OpMode(recorder) if ops else contextlib.nullcontext()

        numbers = [torch.autograd._get_sequence_nr()]

        def backward() -> None:
            numbers.append(torch.autograd._get_sequence_nr())
            with mode if in_a_thread else contextlib.nullcontext():
                y.sum().backward()

        if in_a_thread:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        else:
            backward()
        assert (numbers[1] < numbers[0]) == in_a_thread, "another thread counts its nodes anew"

    return recorded(work, ops=ops)


@pytest.mark.parametrize("where", ["here", "thread", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_backward_sends_is_no_recomputation_and_what_it_recomputes_is(where: str):
    events = several_layers(where)
    sums = [(e.phase, e.scope) for e in events if e.name == "all_reduce"]
    node = "|SummedBackward"
    assert sums == [
        *(("forward", name) for name in ("layer0", "layer1", "layer2.inner")),
        # layer2.inner is in the second run of both without a graph, as it was in the first, and then a third time.
        *(("recompute", name) for name in ("layer1", "layer2.inner", "layer2.inner")),
        *(("backward", f"{name}{node}") for name in ("layer2.inner", "layer1", "layer0")),
    ]
    inside = [(e.phase, e.scope) for e in events if e.name == "exchange"]
    assert inside == [(phase, f"{scope}:all_reduce") for phase, scope in sums]
    gathers = [(e.phase, e.scope) for e in events if e.name == "gather"]
    assert gathers == [("forward", "layer3"), ("recompute", "layer3|PowBackward0")]


def test_identities_do_not_depend_on_the_thread_of_the_backward():
    here, there = (several_layers(where, ops=True) for where in ("here", "thread"))
    assert [(e.scope, e.name, e.phase, e.occurrence) for e in here] == [
        (e.scope, e.name, e.phase, e.occurrence) for e in there
    ]
    backward = {e.scope for e in there if e.phase == "backward" and "mul" in e.name}
    assert backward == {
        "layer0|SinBackward0",
        "layer1|SinBackward0",
        "layer2.inner|SinBackward0",
        "layer2|CosBackward0",
        "layer3:gather|ExpBackward0",
        "layer3|PowBackward0",
    }


def test_an_error_leaves_no_scope_open():
    def work(recorder: Recorder) -> None:
        inside = recorder.scopes.inside
        with pytest.raises(ValueError, match="planted"), inside("outer"), inside("inner"):
            assert recorder.scopes.here() == "inner"
            raise ValueError("planted")
        assert recorder.scopes.here() == ""

    assert recorded(work) == []


def test_a_failed_step_leaves_nothing_to_the_next():
    def fail(*args: object) -> None:
        raise ValueError("planted")

    def notes() -> int:
        return sum(isinstance(found, Note) for found in gc.get_objects())

    lines, chunk = Lines(), torch.nn.Sequential(Block())
    recorder = Recorder(lines)
    probe_modules(chunk, recorder)
    planted = chunk[0].inner.register_forward_hook(fail)
    before = notes()
    recorder.begin_step()
    recorder.segment("forward", 1)
    with pytest.raises(ValueError, match="planted"):
        chunk(torch.ones(2, 4))
    recorder.end_step(1, complete=False)
    assert [e.scope for e in lines.events()] == ["0.inner"]
    assert notes() <= before
    assert recorder.scopes.here() == ""
    planted.remove()
    recorder.begin_step()
    recorder.segment("forward", 2)
    chunk(torch.ones(2, 4))
    assert recorder.scopes.here() == ""
    recorder.end_step(2, complete=True)
    assert [e.scope for e in lines.events()] == ["0.inner", "0.inner", "0"]


def test_hooks_and_modes_change_no_bit():
    def gradients(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        chunk, out = torch.nn.Sequential(Block(), Block()), []

        def work(recorder: Recorder) -> None:
            x = torch.randn(5, 4, requires_grad=True)
            chunk(x).square().sum().backward()
            out.extend([x.grad, *(p.grad for p in chunk.parameters()), torch.randn(2)])

        if watched:
            recorder = Recorder(Lines())
            recorder.begin_step()
            probe_modules(chunk, recorder)
            with OpMode(recorder):
                work(recorder)
        else:
            work(Recorder(Lines()))
        return out

    for plain, traced in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, traced)
