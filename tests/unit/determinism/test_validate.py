"""validate: fixed, not fixed, nothing proven; with a stand-in for the training command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.determinism.bisect import bisect
from megatron.determinism.report import Exit
from megatron.determinism.validate import validate, write_commands

# Writes fingerprints and step times; "shaky" ones differ in leg B, "healed" ones did so only where a file says it.
LEG = """
import argparse, json
from pathlib import Path
from tests.support.fingerprints import record, write_folder
p = argparse.ArgumentParser(allow_abbrev=False)
p.add_argument("--fingerprint-dir", type=Path)
p.add_argument("--fingerprint-interval")
p.add_argument("--run-dir", type=Path)
p.add_argument("kind")
o = p.parse_args()
if o.kind == "fails":
    raise SystemExit("out of luck")
wrong = o.kind == "shaky" and o.fingerprint_dir.parent.name.endswith("_b")
write_folder(o.fingerprint_dir, [record(i, params=f"{i + 100 * wrong * (i > 1):032x}") for i in (1, 2, 3)])
o.run_dir.mkdir()
seconds = 0.3 if o.kind == "slower" else 0.2
steps = [dict(kind="train", iteration=i, elapsed_s=seconds, losses={}) for i in (1, 2, 3)]
(o.run_dir / "metrics.jsonl").write_text("".join(json.dumps(s) + "\\n" for s in steps))
(o.run_dir / "manifest.json").write_text("{}")
"""


def command(kind: str) -> list[str]:
    return [sys.executable, "-c", LEG, kind]


def bisected(folder: Path, kind: str) -> Path:
    write_commands(folder, (command(kind), command(kind)))
    return folder


@pytest.mark.parametrize(
    ("original", "patched", "exit_code", "said"),
    [
        ("shaky", "slower", Exit.SAME, "fixed: the patched pair is identical"),
        ("shaky", "shaky", Exit.DIFFERENT, "not fixed: the patched pair differs"),
        ("steady", "slower", Exit.NOT_COMPARABLE, "nothing is proven: the original pair does not differ any more"),
        ("shaky", "fails", Exit.DAMAGED, "a leg failed with exit code 1"),
        ("fails", "slower", Exit.DAMAGED, "a leg failed with exit code 1"),
    ],
)
def test_verdicts(tmp_path: Path, original: str, patched: str, exit_code: Exit, said: str):
    outcome = validate(bisected(tmp_path, original), command(patched))
    assert outcome.exit == exit_code, outcome
    assert outcome.verdict.startswith(said)


def test_cost_before_and_after_and_a_folder_for_each_try(tmp_path: Path):
    folder = bisected(tmp_path, "shaky")
    for number in (1, 2):
        outcome = validate(folder, command("slower"))
        assert outcome.facts["legs"] == str(folder / f"validate_{number}")
    assert outcome.facts["cost"] == pytest.approx(0.5)
    assert "  median step: 200.0 ms before, 300.0 ms after (+50.0%)" in outcome.details


def test_a_folder_without_a_bisection_is_said(tmp_path: Path):
    assert validate(tmp_path, command("steady")).exit == Exit.DAMAGED


def test_bisect_keeps_its_commands(tmp_path: Path):
    bisect(command("fails"), tmp_path / "b", against=command("steady"))
    outcome = validate(tmp_path / "b", command("steady"))
    assert outcome.exit == Exit.DAMAGED
    assert outcome.facts["command"][3] == "fails"
