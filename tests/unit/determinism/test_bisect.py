"""bisect: which legs it runs, how it narrows, and what it leaves behind; with a stand-in for the training command."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.determinism.bisect import bisect
from megatron.determinism.report import Exit
from megatron.determinism.reproduce import choice_lines, conclusion

# Writes what a run of two ranks would: fingerprints, and traces where they are asked for. Leg B differs in iteration 2,
# and there on rank 1 alone.
LEG = """
import argparse, dataclasses, json, sys
from pathlib import Path
from megatron.core.trace.format import dump_folder
from tests.support.fingerprints import record, write_folder
from tests.support.settings import effective
from tests.support.traces import op, write_trace

p = argparse.ArgumentParser(allow_abbrev=False)
for flag in "fingerprint-dir fingerprint-interval fingerprint-level trace-dir trace-level trace-dump save".split():
    p.add_argument("--" + flag)
p.add_argument("--trace-iterations", default="1:3")
p.add_argument("--exit-interval", type=int, default=3)
p.add_argument("--setting")
p.add_argument("kind")
o = p.parse_args()
leg = Path(o.fingerprint_dir).parent.name
wrong = leg.endswith("_b") and o.kind != "steady" and not (o.kind == "once" and leg != "metrics_b")
if o.kind == "fails" and leg == "module_b":
    sys.exit("out of luck")

def digest(i):
    return f"{i + (100 if wrong and i > 1 else 0):032x}"

if o.kind == "long" and leg == "metrics_b":
    Path(o.fingerprint_dir).parent.mkdir(parents=True)
    (Path(o.fingerprint_dir).parent / "started").touch()
span = range(1, o.exit_interval + 1)
shared = [record(i, params=f"{i:032x}" if o.kind == "drifts" else digest(i)) for i in span]
write_folder(Path(o.fingerprint_dir), shared, effective(o.setting) if o.setting else None)
if o.kind == "drifts":
    own = (json.dumps(record(i, params=digest(i)).line()) for i in span)
    (Path(o.fingerprint_dir) / "rank_00000.jsonl").write_text("\\n".join(own) + "\\n")
if o.kind == "long" and leg == "metrics_b":
    import time
    time.sleep(900)
    (Path(o.fingerprint_dir).parent / "ended").touch()
if o.trace_dir:
    first, _, stop = o.trace_iterations.partition(":")
    window = int(first), int(stop or first)
    scope, meta = "decoder.layers.3.mlp.router", {"dump": "000000.pt"} if o.trace_dump else {}
    def steps(rank):
        return {
            i: [
                op("aten.exp.default", "1", "2", scope),
                op("aten.mul.Tensor", "2", "9" if rank and wrong and i == 2 else "3", scope, meta=meta),
            ]
            for i in range(window[0], window[1] + 1)
        }
    write_trace(Path(o.trace_dir), {rank: steps(rank) for rank in (0, 1)}, level=o.trace_level, iterations=window)
if o.trace_dump and o.kind == "differs":
    import torch
    assert o.trace_dump == "decoder.layers.3"
    given = {"args": (torch.arange(3.0), 2.0), "kwargs": {}}
    results = torch.arange(3.0) * (2.5 if wrong else 2.0)
    file = Path(o.trace_dir) / dump_folder(1) / "000000.pt"
    file.parent.mkdir()
    torch.save({"kind": "op", "arguments": given, "results": results}, file)
"""


def launch(kind: str, *more: str) -> list[str]:
    return [sys.executable, "-c", LEG, kind, *more]


def test_runs_that_agree_end_after_one_pair(tmp_path: Path):
    outcome = bisect(launch("steady"), tmp_path / "b")
    assert outcome.exit == Exit.SAME, outcome
    assert sorted(p.name for p in (tmp_path / "b").glob("*.log")) == ["metrics_a.log", "metrics_b.log"]


def test_operation_is_named_and_reproduced(tmp_path: Path):
    outcome = bisect(launch("differs"), tmp_path / "b")
    said = "\n".join([outcome.verdict, *outcome.details])
    assert outcome.exit == Exit.DIFFERENT, said
    facts = outcome.facts
    assert (facts["iteration"], facts["op"], facts["module"]) == (2, "aten.mul.Tensor", "decoder.layers.3.mlp.router")
    assert (facts["mechanism"], facts["origin_ranks"]) == ("operation", [1])
    assert outcome.next_action.startswith("run the reproducer; read the operation for"), outcome.next_action
    assert [level["level"] for level in facts["levels"]] == ["metrics", "module", "kernel"]
    assert "--exit-interval" in facts["levels"][1]["flags"]
    script = Path(facts["reproducer"])
    assert len(script.read_text().splitlines()) < 45
    done = subprocess.run([sys.executable, str(script), "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "inputs of the two runs are the same" in done.stdout
    assert done.stdout.count("3 repeats: 1 different results") == 2
    assert re.findall("^rank .*, run .:", done.stdout, re.M) == ["rank 1, run A:", "rank 1, run B:"]
    verdict = "verdict: run B's result on rank 1 is not what 3 repeats of its arguments give; run A's is"
    assert done.stdout.splitlines()[-1] == verdict


@pytest.mark.parametrize(
    ("results", "again", "same_inputs", "said"),
    [
        ("xx", ("xx", "xx"), True, "both runs' results on rank 5 are what 2 repeats of their arguments give: nothing"),
        ("xy", ("xx", "yy"), False, "both runs' results on rank 5 are what 2 repeats .* give: the inputs differ"),
        ("xy", ("xx", "yy"), True, "on rank 5 the same arguments give different results when repeated"),
        ("xx", ("xx", "xy"), True, "on rank 5 the same arguments give different results when repeated"),
        ("xy", ("xx", "xx"), True, "run B's result on rank 5 is not what 2 repeats of its arguments give; run A's is"),
        ("xy", ("y", "y"), True, "run A's result on rank 5 is not what 1 repeat of its arguments gives; run B's is"),
        ("xx", ("zz", "zz"), True, "neither run's result on rank 5 is what 2 repeats of its arguments give"),
        ("xy", ("", ""), True, "nothing was repeated; on rank 5 the inputs .* are the same, the results different"),
    ],
)
def test_what_repeats_say(results: str, again: tuple[str, str], same_inputs: bool, said: str):
    repeated = {run: [(digest,) for digest in digests] for run, digests in zip("ab", again, strict=True)}
    sentence = conclusion(5, {run: (digest,) for run, digest in zip("ab", results, strict=True)}, repeated, same_inputs)
    assert re.match(said, sentence), sentence


def test_equal_choices_are_said_once():
    variants = {("A", 0): "triton", ("A", 1): "triton", ("B", 0): "triton", ("B", 1): "reference"}
    chosen = [
        {"run": run, "rank": rank, "op": "rope", "variant": "reference", "config": None} for run, rank in variants
    ]
    chosen += [
        {"run": run, "rank": rank, "op": "norm", "variant": variant, "config": {"block": 64}}
        for (run, rank), variant in variants.items()
    ]
    assert choice_lines(chosen) == [
        "  both runs, ranks 0, 1: rope = reference",
        "  run A, ranks 0, 1; run B, rank 0: norm = triton {'block': 64}",
        "  run B, rank 1: norm = reference {'block': 64}",
    ]


def test_state_that_differs_on_a_rank_alone_is_followed_too(tmp_path: Path):
    outcome = bisect(launch("drifts"), tmp_path / "b")
    said = "\n".join([outcome.verdict, *outcome.details])
    assert outcome.exit == Exit.DIFFERENT, said
    assert (outcome.facts["iteration"], outcome.facts["op"]) == (2, "aten.mul.Tensor")
    assert "in the fingerprints first at iteration 2, in params of rank_00000" in said


def test_second_leg_is_stopped_once_it_differs(tmp_path: Path):
    outcome = bisect(launch("long"), tmp_path / "b")
    assert (tmp_path / "b/metrics_b/started").exists()
    assert not (tmp_path / "b/metrics_b/ended").exists()
    assert (outcome.exit, outcome.facts["op"]) == (Exit.DIFFERENT, "aten.mul.Tensor"), outcome


def test_leg_that_fails_is_said(tmp_path: Path):
    outcome = bisect(launch("fails"), tmp_path / "b")
    assert outcome.exit == Exit.DAMAGED
    assert any("out of luck" in line for line in outcome.details)


def test_difference_that_does_not_come_back_is_no_verdict_on_an_operation(tmp_path: Path):
    outcome = bisect(launch("once"), tmp_path / "b")
    assert outcome.exit == Exit.DIFFERENT
    assert "comes and goes" in outcome.verdict
    out = io.StringIO()
    outcome.print(out, as_json=False)
    assert re.findall("next: (.*)", out.getvalue()) == [outcome.next_action]
    assert outcome.next_action.startswith("run bisect again")
    assert outcome.facts["op"] is None
    assert [level["level"] for level in outcome.facts["levels"]] == ["metrics", "module", "module_wide"]


def test_two_commands_are_compared_with_each_other_and_their_settings_named_by_flag(tmp_path: Path):
    outcome = bisect(launch("steady"), tmp_path / "b", against=launch("once-more", "--setting=--num-workers=3"))
    assert outcome.facts["reproducer"] is None
    assert outcome.facts["module"] == "decoder.layers.3.mlp.router"
    assert "  operational.data.num_workers (--num-workers): 2 in A, 3 in B" in outcome.details


def test_checkpoints_of_the_legs_stay_apart(tmp_path: Path):
    outcome = bisect(launch("steady", "--save", str(tmp_path / "mine")), tmp_path / "b")
    assert outcome.exit == Exit.SAME
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("flag", ["--trace-dir", "--fingerprint-dir"])
def test_what_is_refused(tmp_path: Path, flag: str):
    assert bisect(launch("steady", flag, "x"), tmp_path / "b").exit == Exit.NOT_COMPARABLE
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in bisect(launch("steady"), tmp_path / "full").verdict
