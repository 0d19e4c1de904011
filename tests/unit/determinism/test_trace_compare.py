"""trace-compare: alignment, classes, the verdict over ranks, what is refused, and what it costs."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.trace.format import Event, trace_file
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.trace_compare import trace_compare
from tests.support.fingerprints import record, write_folder
from tests.support.traces import Steps, all_gather, op, seen, write_trace

PLAIN = [op("aten.add.Tensor", "1", "2"), op("aten.mul.Tensor", "2", "3"), op("aten.add.Tensor", "3", "4")]


def compared(tmp_path: Path, left: dict[int, Steps], right: dict[int, Steps], **of_right: object) -> Outcome:
    a = write_trace(tmp_path / "a", left)
    return trace_compare(a, write_trace(tmp_path / "b", right, **of_right))


def changed(events: list[Event], position: int, **changes: object) -> list[Event]:
    return [replace(e, **changes) if i == position else e for i, e in enumerate(events)]


def test_equal_traces(tmp_path: Path):
    outcome = compared(tmp_path, {0: {1: PLAIN, 2: PLAIN}}, {0: {1: PLAIN, 2: PLAIN}})
    assert outcome.exit == Exit.SAME
    assert outcome.verdict == "no difference in 6 events of 1 rank"


def test_first_mismatch_is_named_with_its_tensors(tmp_path: Path):
    wrong = changed(PLAIN, 1, outs=(seen("9", "result"),))
    wrong = changed(wrong, 2, ins=(seen("9"),), outs=(seen("8", "result"),))
    outcome = compared(tmp_path, {0: {1: PLAIN, 2: PLAIN}}, {0: {1: PLAIN, 2: wrong}})
    assert outcome.exit == Exit.DIFFERENT
    first = outcome.facts["first_difference"]
    assert (first["class"], first["iteration"], first["op"]) == ("candidate_origin", 2, "aten.mul.Tensor")
    assert (first["inputs_differ"], first["outputs_differ"]) == ([], ["result"])
    assert "decoder.layers.0.mixer" in outcome.verdict


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["aten.add.Tensor", "aten.extra.default"])
def test_extra_event_shifts_nothing(tmp_path: Path, position: int, name: str):
    extra = [*PLAIN[:position], op(name, "7", "7"), *PLAIN[position:]]
    outcome = compared(tmp_path, {0: {1: PLAIN}}, {0: {1: extra}})
    assert outcome.exit == Exit.SAME, outcome
    assert (outcome.facts["common_events"], outcome.facts["extra_events"]) == (3, 1)


def test_extra_events_of_both_runs_are_counted_and_named(tmp_path: Path):
    left = [*PLAIN, *(op("aten.only.left", str(n), "7") for n in range(25))]
    right = [*PLAIN, op("aten.only.right", "7", "7")]
    outcome = compared(tmp_path, {0: {1: left}}, {0: {1: right}})
    assert (outcome.exit, outcome.facts["extra_events"]) == (Exit.SAME, 26)
    assert [line.strip().partition(" in decoder")[0] for line in outcome.details] == [
        "rank 0: 25 events in A only, the first one aten.only.left",
        "rank 0: 1 event in B only, the first one aten.only.right",
    ]


def with_variant(variant: str, name: str, outs: str) -> list[Event]:
    """An op whose two variants do different things inside, and the operation behind it."""
    scope = "decoder.layers.0.mixer"
    inside = (
        op(name, "1", outs, scope=f"{scope}:ssd_scan"),
        op("aten.exp.default", outs, outs, scope=f"{scope}:ssd_scan"),
    )
    own = op("ssd_scan", "1", outs, kind="kernel", meta={"variant": variant})
    return [*inside, own, op("aten.add.Tensor", outs, outs)]


def test_another_variant_of_an_op_is_named_and_not_what_it_does_inside(tmp_path: Path):
    left, right = with_variant("fused", "aten.mul.Tensor", "2"), with_variant("reference", "aten.sub.Tensor", "3")
    first = compared(tmp_path, {0: {1: left}}, {0: {1: right}}).facts["first_difference"]
    assert (first["op"], first["class"], first["mechanism"]) == ("ssd_scan", "candidate_origin", "other_variant")


def test_inside_of_the_same_variant_is_compared(tmp_path: Path):
    left, right = with_variant("fused", "aten.mul.Tensor", "2"), with_variant("fused", "aten.mul.Tensor", "3")
    assert compared(tmp_path, {0: {1: left}}, {0: {1: right}}).facts["first_difference"]["op"] == "aten.mul.Tensor"


def test_mismatch_behind_an_extra_event_is_found(tmp_path: Path):
    extra = [op("aten.extra.default", "7", "7"), *changed(PLAIN, 2, outs=(seen("9", "result"),))]
    outcome = compared(tmp_path, {0: {1: PLAIN}}, {0: {1: extra}})
    assert outcome.facts["first_difference"]["outputs_differ"] == ["result"]
    assert outcome.facts["first_difference"]["occurrence"] == 0
    assert outcome.facts["extra_events"] == 1


def test_input_that_nobody_made_came_from_outside(tmp_path: Path):
    outcome = compared(tmp_path, {0: {1: PLAIN}}, {0: {1: changed(PLAIN, 0, ins=(seen("9"),))}})
    assert outcome.facts["first_difference"]["class"] == "outside_capture"
    assert outcome.facts["mechanism"] == "outside_capture"
    assert outcome.verdict.startswith("different: outside_capture at "), "said once"


@pytest.mark.parametrize(
    ("level", "start", "said"),
    [
        ("op", 2, "trace at level kernel, or from an earlier iteration"),
        ("op", 1, "trace at level kernel"),
        ("kernel", 2, "trace from an earlier iteration"),
        ("kernel", 1, "look for what writes this tensor unrecorded"),
    ],
)
def test_only_what_can_be_traced_is_advised(tmp_path: Path, level: str, start: int, said: str):
    what = {"level": level, "iterations": (start, None)}
    a = write_trace(tmp_path / "a", {0: {2: PLAIN}}, **what)
    b = write_trace(tmp_path / "b", {0: {2: changed(PLAIN, 0, ins=(seen("9"),))}}, **what)
    assert trace_compare(a, b).next_action.startswith(said)


@pytest.mark.parametrize(("start", "said"), [(1, "compare what the runs start from"), (2, "trace earlier iterations")])
def test_other_masters_at_the_start_come_from_no_earlier_iteration(tmp_path: Path, start: int, said: str):
    meta = {"shards": [0], "start": 0, "at": "before"}
    masters = {run: Event("state", "w", "main_params", 0, "state", (), (seen(run),), meta=meta) for run in "56"}
    a, b = (write_trace(tmp_path / run, {0: {start: [masters[run]]}}, iterations=(start, None)) for run in ("5", "6"))
    outcome = trace_compare(a, b)
    assert outcome.facts["mechanism"] == "state_before"
    assert outcome.next_action.startswith(said)


def test_input_changed_after_its_producer_is_a_race(tmp_path: Path):
    outcome = compared(tmp_path, {0: {1: PLAIN}}, {0: {1: changed(PLAIN, 1, ins=(seen("9"),))}})
    assert outcome.facts["first_difference"]["class"] == "outside_capture"
    assert outcome.facts["mechanism"] == "race"


def over_two_ranks(own: str, gathered: str) -> dict[int, Steps]:
    first = {1: [op("aten.mm.default", "1", own), all_gather(own, gathered, (0, 1))]}
    return {0: first, 1: {1: [op("aten.mm.default", "5", "6"), all_gather("6", gathered, (0, 1))]}}


def test_receiver_is_told_from_origin(tmp_path: Path):
    outcome = compared(tmp_path, over_two_ranks("2", "a"), over_two_ranks("3", "b"))
    classes = {f["rank"]: (f["class"], f["from_ranks"]) for f in outcome.facts["first_mismatches"]}
    assert classes == {0: ("candidate_origin", []), 1: ("downstream_receiver", [0])}
    assert outcome.facts["origin_ranks"] == [0]
    said = "only rank 0 of 0, 1 differs at first (its tp=0), so less the operation itself than something about"
    assert outcome.facts["verdict_over_ranks"].startswith(said)
    assert outcome.next_action.startswith("let `megatron-determinism bisect` run the two commands"), "no script is here"
    assert outcome.facts["mechanism"] == "library_kernel"


def test_collective_itself_is_the_origin_where_all_gave_the_same(tmp_path: Path):
    outcome = compared(tmp_path, over_two_ranks("2", "a"), over_two_ranks("2", "b"))
    assert {f["class"] for f in outcome.facts["first_mismatches"]} == {"candidate_origin"}
    assert outcome.facts["mechanism"] == "communication_path"
    assert "all ranks that run it" in outcome.facts["verdict_over_ranks"]


def test_untraced_member_is_not_guessed_about(tmp_path: Path):
    left, right = over_two_ranks("2", "a"), over_two_ranks("2", "b")
    outcome = compared(tmp_path, {0: left[0]}, {0: right[0]})
    assert outcome.facts["mechanism"] == "untraced_peer"
    assert outcome.facts["first_difference"]["class"] == "outside_capture"


def test_rows_in_another_order_are_recognised(tmp_path: Path):
    left = [op("aten.index_select.default", "1", "2", rows="5")]
    right = [op("aten.index_select.default", "1", "3", rows="5")]
    assert compared(tmp_path, {0: {1: left}}, {0: {1: right}}).facts["mechanism"] == "permuted_dispatch"


def test_killed_run_is_compared_as_far_as_it_goes(tmp_path: Path):
    a = write_trace(tmp_path / "a", {0: {1: PLAIN, 2: PLAIN}})
    b = write_trace(tmp_path / "b", {0: {1: PLAIN, 2: PLAIN}}, closed=False)
    file = b / trace_file(0)
    file.write_bytes(file.read_bytes()[:-120])
    outcome = trace_compare(a, b)
    assert outcome.exit == Exit.DAMAGED
    assert "no difference in the 5 events that can be read" in outcome.verdict
    assert str(file) in outcome.details[0]
    assert outcome.facts["extra_events"] == 0


def test_difference_before_the_cut_is_reported(tmp_path: Path):
    a = write_trace(tmp_path / "a", {0: {1: PLAIN, 2: PLAIN}})
    wrong = changed(PLAIN, 1, outs=(seen("9", "result"),))
    b = write_trace(tmp_path / "b", {0: {1: wrong}}, closed=False)
    outcome = trace_compare(a, b)
    assert outcome.exit == Exit.DIFFERENT
    assert any("cut off" in line for line in outcome.details)


def test_damage_is_named(tmp_path: Path):
    a = write_trace(tmp_path / "a", {0: {1: PLAIN}})
    b = write_trace(tmp_path / "b", {0: {1: PLAIN}})
    file = b / trace_file(0)
    lines = file.read_bytes().splitlines(keepends=True)
    for broken in ([*lines[:3], b'{"e":"op", what\n', *lines[4:]], [*lines[:3], *lines[4:]], [b"{}\n", *lines[1:]]):
        file.write_bytes(b"".join(broken))
        outcome = trace_compare(a, b)
        assert outcome.exit == Exit.DAMAGED, outcome
        assert str(file) in outcome.verdict


def test_no_flipped_bit_ends_in_a_traceback(tmp_path: Path):
    weights = Event(
        "state", "w", "weights", 0, "state", (), (seen("5"),), meta={"shards": [0], "start": 0, "at": "before"}
    )
    events = {run: [weights, op("aten.exp.default", "1", "2"), all_gather("2", run, (0, 1))] for run in "34"}
    a, b = (write_trace(tmp_path / run, {0: {1: events[run]}, 1: {1: events["3"]}}) for run in "34")
    assert trace_compare(a, b).exit == Exit.DIFFERENT
    for name in (trace_file(0), "manifest.json"):
        whole, exits = (a / name).read_bytes(), set()
        for at in range(0, len(whole), 3 if name != "manifest.json" else 41):
            (a / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
            exits.add(trace_compare(a, b).exit)
        assert {Exit.DIFFERENT, Exit.DAMAGED} <= exits
        (a / name).write_bytes(whole)


def test_traces_or_ranks_without_a_common_event_say_nothing(tmp_path: Path):
    none = compared(tmp_path / "none", {0: {}}, {0: {}})
    assert none.exit == Exit.NOT_COMPARABLE
    assert none.verdict == "not comparable: neither holds an event of the iterations both trace, on rank 0"
    one = compared(tmp_path / "one", {0: {1: PLAIN}, 1: {1: PLAIN}}, {0: {1: PLAIN}, 1: {2: PLAIN}})
    assert one.exit == Exit.NOT_COMPARABLE
    assert one.verdict == "not comparable: no event in common on rank 1"
    assert one.details[0].startswith("  rank 1: 3 events in A only")


def test_a_report_that_cannot_be_written_hides_no_verdict(tmp_path: Path):
    wrong = changed(PLAIN, 1, outs=(seen("9", "result"),))
    a, b = (write_trace(tmp_path / run, {0: {1: events}}) for run, events in (("a", PLAIN), ("b", wrong)))
    outcome = trace_compare(a, b, report=tmp_path / "nowhere" / "page.html")
    assert outcome.exit == Exit.DIFFERENT
    assert "report: could not be written" in outcome.details[-1]


def test_missing_rank_is_damage(tmp_path: Path):
    outcome = compared(tmp_path, {0: {1: PLAIN}, 1: {1: PLAIN}}, {0: {1: PLAIN}}, traced=(0, 1))
    assert outcome.exit == Exit.DAMAGED
    assert trace_file(1) in outcome.verdict


@pytest.mark.parametrize(
    ("of_right", "said"),
    [
        ({"trajectory": {"seed": 7}}, "1 fixed input differs"),
        ({"level": "module"}, "the levels differ"),
        ({"iterations": (5, 6)}, "neither holds an event of the iterations both trace"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, of_right: dict, said: str):
    outcome = compared(tmp_path, {0: {1: PLAIN}}, {0: {1: PLAIN}}, **of_right)
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert said in outcome.verdict
    if "trajectory" in of_right:
        assert any(line.startswith("  seed (--seed): ") and line.endswith("7 in B") for line in outcome.details)
        assert outcome.facts["problems"] == ["1 fixed input differs", *(line.strip() for line in outcome.details)]


def test_other_ranks_and_iterations_are_named_in_words(tmp_path: Path):
    a = write_trace(tmp_path / "a", {0: {1: PLAIN}, 1: {1: PLAIN}}, iterations=(1, 2))
    b = write_trace(tmp_path / "b", {2: {5: PLAIN}, 3: {5: PLAIN}}, iterations=(5, None))
    manifest = json.loads((b / "manifest.json").read_text())
    layout = manifest["launches"][-1]["physical_layout"]
    layout["pp"] = 2
    (b / "manifest.json").write_text(json.dumps(manifest))
    assert trace_compare(a, b).facts["problems"] == [
        "the ranks are laid out differently: tp 1, pp 1, dp 1, ep 1, etp 1, edp 1 in A, "
        "tp 1, pp 2, dp 1, ep 1, etp 1, edp 1 in B",
        "no rank in common: 0, 1 in A, 2, 3 in B",
        "no iteration in common: 1 to 2 in A, 5 to the end in B",
    ]


def test_folder_without_a_trace_and_another_format(tmp_path: Path):
    a = write_trace(tmp_path / "a", {0: {1: PLAIN}})
    assert trace_compare(a, tmp_path).exit == Exit.DAMAGED
    manifest = json.loads((a / "manifest.json").read_text())
    manifest["trace"]["format"] = 99
    (a / "manifest.json").write_text(json.dumps(manifest))
    outcome = trace_compare(a, a)
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "99" in outcome.verdict


def test_report_is_one_page(tmp_path: Path):
    outcome = compared(tmp_path, over_two_ranks("2", "a"), over_two_ranks("3", "b"))
    page = Path(outcome.facts["report"])
    assert page == tmp_path / "b" / "trace_compare.html"
    text = page.read_text("utf-8")
    assert "decoder.layers.0" in text
    assert "received" in text
    assert "<script" not in text


def test_cost_grows_with_events_not_with_iterations(tmp_path: Path):
    # A 40th of 8 ranks, 5 iterations, 1 million events, the worst case: every event differs from the second on.
    events = [
        op(f"aten.op{i % 50}.default", f"{i:x}", f"{i + 1:x}", scope=f"decoder.layers.{i % 24}") for i in range(5000)
    ]
    other = [events[0], *(replace(e, outs=(seen(f"f{i:x}", "result"),)) for i, e in enumerate(events[1:]))]
    a = write_trace(tmp_path / "a", {0: dict.fromkeys(range(1, 6), events)})
    b = write_trace(tmp_path / "b", {0: dict.fromkeys(range(1, 6), other)})
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert trace_compare(a, b).exit == Exit.DIFFERENT
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert time.process_time() - started < 60 / 40 * 4, "four times the share, for a busy machine"
    assert grown_mib < 200


def test_a_fingerprint_folder_is_told_apart(tmp_path: Path):
    prints = write_folder(tmp_path, [record(1)])
    assert "is a fingerprint folder, which compare takes" in trace_compare(prints, prints).verdict
