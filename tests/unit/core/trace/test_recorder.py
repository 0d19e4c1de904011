"""What a recorder writes: identities, levels' events, marks that rule out false alarms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.core.trace.dump import Dump, on_host
from megatron.core.trace.flatten import named_tensors, plain_arguments
from megatron.core.trace.format import Event
from megatron.core.trace.op_mode import OpMode
from megatron.core.trace.recorder import Recorder
from megatron.core.trace.tensor_digest import Digester
from tests.support.recording import Lines, recorded
from tests.support.traces import encode_event


def names(events: list[Event]) -> list[str]:
    return [event.name.removeprefix("aten.").partition(".")[0] for event in events]


def test_views_and_fresh_memory_are_no_events():
    def work(recorder: Recorder) -> None:
        x = torch.empty(2, 3)
        x.fill_(1.0)
        x.view(3, 2).t() + 1

    events = recorded(work)
    assert names(events) == ["fill_", "add"]
    assert events[0].ins == (), "what fill_ overwrites is not read"


def test_in_place_operations_are_digested_before_and_after():
    def work(recorder: Recorder) -> None:
        torch.ones(3).add_(1)

    (event,) = [e for e in recorded(work) if "add_" in e.name]
    assert event.ins[0].digest != event.outs[0].digest
    assert event.outs[0].label == "self"


def test_reading_memory_nobody_wrote_is_marked():
    def work(recorder: Recorder) -> None:
        torch.empty(4) + 1
        half = torch.empty(4)
        half[:2].fill_(1)
        half * 2
        half[2:].fill_(1)
        half * 3

    marks = [event.ins[0].unwritten for event in recorded(work) if event.ins]
    assert marks == [True, True, False]


def test_occurrences_count_within_a_segment():
    def work(recorder: Recorder) -> None:
        x = torch.ones(2)
        x * 2
        x * 3
        recorder.segment("optimizer", 1)
        x * 4

    muls = [event for event in recorded(work) if "mul" in event.name]
    assert [(e.phase, e.occurrence) for e in muls] == [("forward", 0), ("forward", 1), ("optimizer", 0)]


def test_lines_are_those_that_the_format_says():
    def work(recorder: Recorder) -> None:
        x = torch.arange(6).view(2, 3)
        (x.t() + torch.empty(3, 2)).sum()
        recorder.around("sum", "planted", lambda: x * 2, ins=[x], meta={"ranks": [0, 1]}, rows=True)

    lines = Lines()
    recorder = Recorder(lines)
    recorder.begin_step()
    recorder.segment("forward", 1)
    with OpMode(recorder):
        work(recorder)
    recorder.end_step(1, complete=True)
    assert [encode_event(event) for event in lines.events()] == lines.raw.splitlines(keepends=True)[1:-1]


def noted(trusting: bool) -> tuple[Recorder, torch.Tensor, list[str]]:
    """A recorder, a tensor it has seen, and the digests of its second look before and after a change in place."""
    recorder, x, digests = Recorder(lambda raw: None, trusting=trusting), torch.ones(3, 4), []
    recorder.segment("forward", 1)
    recorder.reader.note(x)
    for change in (0, 1):
        x.add_(1) if change else None
        (note,) = recorder.reader.note((x.view(12),), reuse=True)
        digests.append(str(note.whole))
    return recorder, x, digests


def test_unchanged_tensors_are_not_read_again_where_versions_are_trusted():
    recorder, x, digests = noted(True)
    assert (recorder.reader.tensors, recorder.reader.known) == (3, 1)
    assert digests[0] != digests[1]
    recorder.reader.note(x)
    recorder.reader.note(x[:1], reuse=True)
    recorder.reader.note(x.view(torch.int32), reuse=True)
    recorder.segment("backward", 1)
    recorder.reader.note(x, reuse=True)
    assert recorder.reader.known == 1, "another part, type or segment is read"
    assert noted(False)[0].reader.known == 0
    assert noted(False)[2] == digests


def test_rows_of_an_unchanged_tensor_are_not_read_again_either(monkeypatch: pytest.MonkeyPatch):
    read, by_row = [], Digester.by_row
    monkeypatch.setattr(Digester, "by_row", lambda digester, x: read.append(x.shape) or by_row(digester, x))
    recorder, ids = Recorder(lambda raw: None, trusting=True), torch.arange(12).view(4, 3)
    recorder.segment("forward", 1)
    first, again = recorder.reader.note(ids), recorder.reader.note([ids, ids.view(4, 3)], reuse=True)
    assert read == [(4, 3)]
    assert {str(note.by_row) for note in (*first, *again)} == {str(by_row(Digester(), ids))}
    (other,) = recorder.reader.note(ids.view(3, 4), reuse=True)
    assert read == [(4, 3), (3, 4)]
    assert other.by_row == by_row(Digester(), ids.view(3, 4))
    ids.add_(1)
    recorder.reader.note(ids, reuse=True)
    assert read == [(4, 3), (3, 4), (4, 3)]


def test_an_error_in_a_step_leaves_what_came_before():
    lines = Lines()
    recorder = Recorder(lines)
    recorder.begin_step()
    recorder.segment("forward", 1)
    with OpMode(recorder):
        torch.ones(2) + 1
    recorder.end_step(1, complete=False)
    assert [e.name for e in lines.events()] == ["aten.ones.default", "aten.add.Tensor"]
    assert b'"end"' not in lines.raw


def test_dumped_arguments_repeat_the_result(tmp_path: Path):
    def work(recorder: Recorder) -> None:
        with recorder.scopes.inside("layer"):
            torch.full((2,), 3.0) * 2
        torch.ones(2) * 5

    events = recorded(work, dump=Dump(tmp_path, "layer:aten.mul", 1 << 20))
    dumped = [e.meta["dump"] for e in events if "dump" in e.meta]
    assert dumped == ["000000.pt"]
    content = torch.load(tmp_path / dumped[0])
    assert torch.equal(torch.mul(*content["arguments"]["args"]), content["results"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).view(3, 1).expand(3, 5),
        torch.zeros(0, 2),
        torch.tensor(2.0),
    ],
    ids=["transposed", "expanded", "empty", "scalar"],
)
def test_dumped_tensors_keep_values_and_strides(tensor: torch.Tensor):
    copy = on_host({"x": [tensor]})["x"][0]
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def test_what_cannot_be_kept_leaves_its_name():
    assert on_host((torch.contiguous_format, 3, object())) == ("torch.contiguous_format", 3, "<object>")


def test_work_of_the_recorder_is_no_event(tmp_path: Path):
    def work(recorder: Recorder) -> None:
        x = torch.ones(3, 5).t()
        recorder.around("kernel", "planted", lambda: x * 2, ins=[x], rows=True)

    plain, dumped = recorded(work), recorded(work, dump=Dump(tmp_path, "", 1 << 20))
    assert [e.name for e in plain] == [e.name for e in dumped] == ["aten.ones.default", "aten.mul.Tensor", "planted"]


def test_dump_stops_at_its_limit(tmp_path: Path):
    def work(recorder: Recorder) -> None:
        for _ in range(4):
            torch.ones(8) * 5

    events = recorded(work, dump=Dump(tmp_path, ":aten.mul", 40))
    assert sum("dump" in e.meta for e in events) == 2
    events = recorded(work, dump=Dump(tmp_path / "small", ":aten.mul", 1))
    assert sum("dump" in e.meta for e in events) == 1, "the one that passes the limit is kept whole"


class Quantised(torch.Tensor):
    """A tensor made of codes and scales, as quantised weights are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Quantised:
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        self.codes, self.scales = codes, scales
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, meta: None, size: tuple, stride: tuple) -> Quantised:
        return Quantised(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise TypeError(f"{func} on a quantised tensor")


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: float


def test_tensors_are_found_under_their_names():
    x = torch.ones(1)
    value = {"a": [x, 3], "b": Pair(x, 0.5), "q": Quantised(x, x)}
    assert [label for label, _ in named_tensors(value)] == ["a.0", "b.left", "q.codes", "q.scales"]
    assert plain_arguments(value) == "{a: (_, 3), b: Pair(left=_, right=0x1.0000000000000p-1), q: _}"
