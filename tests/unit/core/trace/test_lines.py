"""Lines of a step: what identifies an event, and that nothing of one step is left to the next."""

from __future__ import annotations

import json

from megatron.core.trace.digest_queue import Sent
from megatron.core.trace.line_writer import LineWriter
from megatron.core.trace.lines import Lines
from megatron.core.trace.reader import Note

HERE = ("layer", "mul", "forward")


def written(lines: Lines) -> list[dict]:
    raw: list[bytes] = []
    LineWriter(raw.append).start(lines.take(), Sent({}))
    return [json.loads(line) for line in b"".join(raw).splitlines()]


def test_occurrences_count_by_place_whatever_the_kind_and_anew_in_every_segment():
    lines = Lines()
    for iteration in (1, 2):
        lines.segment("forward", iteration, {"chunk": 0})
        for kind, place in (("op", HERE), ("kernel", HERE), ("op", ("other", "mul", "forward"))):
            lines.event(kind, place, (), (), "", None)
    lines.end(2)
    found = written(lines)
    assert found[0] == {"segment": {"pass": "forward", "iteration": 1, "chunk": 0}}
    assert [(line["e"], line["o"]) for line in found if "e" in line] == [("op", 0), ("kernel", 1), ("op", 0)] * 2
    assert found[-1] == {"end": 2, "events": 6}
    lines.end(3)
    assert written(lines) == [{"end": 3, "events": 0}]


def test_notes_that_are_added_later_are_not_in_the_line():
    lines, notes = Lines(), [Note('["x","float32",[2],null,"', [1, -1])]
    lines.event("op", HERE, notes, (), "", {"variant": "a"})
    notes.append(notes[0])
    (line,) = written(lines)
    assert line["i"] == [["x", "float32", [2], None, f"{1:016x}{'f' * 16}"]]
    assert line["m"] == {"variant": "a"}
