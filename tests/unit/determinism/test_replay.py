"""replay: where it starts, what it runs, when it is faithful; with a stand-in for the training command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from megatron.determinism.compare import compare
from megatron.determinism.replay import replay
from megatron.determinism.report import Exit
from megatron.determinism.trace_commands import window
from megatron.training.observe.fingerprint import FINGERPRINT_FILE
from tests.support.fingerprints import record, write_folder

# Writes the fingerprints of a run that goes on from --ckpt-step; with a number, the iteration from which it differs.
LEG = """
import argparse
from pathlib import Path
from tests.support.fingerprints import record, write_folder
p = argparse.ArgumentParser(allow_abbrev=False)
flags = "fingerprint-dir fingerprint-interval fingerprint-level trace-dir trace-level trace-iterations load"
for flag in flags.split():
    p.add_argument("--" + flag)
p.add_argument("--ckpt-step", type=int, default=0)
p.add_argument("--exit-interval", type=int)
p.add_argument("--exit-on-missing-checkpoint", action="store_true")
p.add_argument("wrong", type=int)
o = p.parse_args()
print(o)
span = range(o.ckpt_step + 1, o.exit_interval + 1)
write_folder(Path(o.fingerprint_dir), [record(i, params=f"{i + 100 * (i >= o.wrong):032x}") for i in span])
"""


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Fingerprints of iterations 1 to 8, and checkpoints of 2, 4 and 6."""
    write_folder(tmp_path / "original", [record(i, params=f"{i:032x}") for i in range(1, 9)])
    for iteration in (2, 4, 6):
        (tmp_path / "checkpoints" / f"iter_{iteration:07d}").mkdir(parents=True)
    return tmp_path / "original"


def launch(original: Path, wrong: int = 99) -> list[str]:
    return [sys.executable, "-c", LEG, str(wrong), "--load", str(original.parent / "checkpoints")]


@pytest.mark.parametrize(("span", "start"), [((5, 6), 4), ((4, 5), 2), ((7, 7), 6)])
def test_starts_from_the_last_checkpoint_before_and_traces_the_window(original: Path, span: tuple, start: int):
    outcome = replay(launch(original), original.parent / "r", original, span, "op")
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.verdict.startswith("faithful: ")
    assert outcome.facts["first_iteration"] == start + 1
    said = (original.parent / "r" / "output.log").read_text()
    assert f"ckpt_step={start}, exit_interval={span[1]}, exit_on_missing_checkpoint=True" in said
    assert f"trace_level='op', trace_iterations='{span[0]}:{span[1]}'" in said


def test_from_the_first_iteration_no_checkpoint_is_needed(original: Path):
    command = launch(original)[:-2]
    assert replay(command, original.parent / "r", original, (1, 3), "module").exit == Exit.SAME
    assert "--load" in replay(command, original.parent / "s", original, (2, 3), "module").verdict


@pytest.mark.parametrize("wrong", [5, 6, 7])
def test_a_replay_that_differs_is_not_faithful(original: Path, wrong: int):
    folder = original.parent / "r"
    outcome = replay(launch(original, wrong), folder, original, (6, 7), "op")
    assert outcome.exit == Exit.DIFFERENT
    assert outcome.details == compare(original, folder / "fingerprint").details
    assert outcome.details[0] == f"  A = {original}, B = {folder / 'fingerprint'}"
    assert outcome.next_action.startswith("losses and gradient norm agree, so the update or the state")
    assert outcome.verdict.startswith("not faithful, so its trace says nothing: different: first at")
    assert outcome.facts["first_difference"]["iteration"] == wrong


def test_iterations_without_a_fingerprint_of_the_original_are_refused_before_anything_runs(original: Path):
    folder = original.parent / "r"
    outcome = replay(launch(original), folder, original, (7, 10), "op")
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "the original run has no fingerprint of iteration 9, 10 (it has 1 to 8)" in outcome.verdict
    endless = replay(launch(original), folder, original, (1, 10**18), "op")
    assert "iteration 9, 10, " in endless.verdict
    assert f" and {10**18 - 16} more (it has 1 to 8)" in endless.verdict
    (original / FINGERPRINT_FILE).write_bytes(b"")
    empty = replay(launch(original), folder, original, (5, 6), "op")
    assert empty.exit == Exit.NOT_COMPARABLE
    assert "no fingerprint of iteration 5, 6 (it has none)" in empty.verdict
    missing = replay(launch(original), folder, original.parent / "nowhere", (5, 6), "op")
    assert missing.exit == Exit.DAMAGED
    assert not folder.exists()


def test_a_replay_that_ends_before_the_window_does_proves_nothing(original: Path):
    command = launch(original)
    command[2] = command[2].replace("o.exit_interval + 1)", "o.exit_interval)")
    outcome = replay(command, original.parent / "r", original, (6, 7), "op")
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "the replay has no fingerprint of iteration 7 (it has 5 to 6)" in outcome.verdict


def test_what_cannot_work_is_refused_before_anything_runs(original: Path):
    folder = original.parent / "r"
    assert "--save" in replay([*launch(original), "--save", "x"], folder, original, (5, 6), "op").verdict
    none = replay(launch(original), folder, original, (2, 3), "op")
    assert none.exit == Exit.NOT_COMPARABLE
    assert "no checkpoint before iteration 2 (it has: 2, 4, 6)" in none.verdict
    assert not folder.exists()
    folder.mkdir()
    (folder / "x").touch()
    assert "not empty" in replay(launch(original), folder, original, (5, 6), "op").verdict


def test_a_replay_that_fails_is_said(original: Path):
    command = [sys.executable, "-c", "raise SystemExit('out of luck')", *launch(original)[-2:]]
    outcome = replay(command, original.parent / "r", original, (5, 6), "op")
    assert outcome.exit == Exit.DAMAGED
    assert any("out of luck" in line for line in outcome.details)


def test_windows():
    assert (window("3:5"), window("4")) == ((3, 5), (4, 4))
    for text in ("5:3", "0:2", "x", "1:", ":2"):
        with pytest.raises(argparse.ArgumentTypeError):
            window(text)
