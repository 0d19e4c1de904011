"""verify: fresh processes, a folder each, and the verdict of compare; a leg that fails is said."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.determinism.report import Exit
from megatron.determinism.verify import default_folder, verify
from tests.support.processes import number_in, runs

# A stand-in for a training command: writes the fingerprint of a run whose weights depend on what argv says, and a
# checkpoint where it stops, at the latest in iteration 7.
LEG = """
import os, sys
from pathlib import Path
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.folder import iteration_folder
from tests.support.fingerprints import record, write_folder
sys.argv[:] = [word for word in sys.argv if word]
folder = Path(sys.argv[sys.argv.index("--fingerprint-dir") + 1])
kind = sys.argv[1]
print("hello from", folder.name)
if kind == "fails" and folder.name == "leg_2":
    sys.exit("out of luck")
digest = f"{os.getpid():032x}" if kind == "drifts" else "0" * 32
if "--save" in sys.argv:
    print("argv", *sys.argv[4:])
    first = "--load" not in sys.argv
    last = "--exit-interval" not in sys.argv
    stop = 7 if last else min(7, int(sys.argv[sys.argv.index("--exit-interval") + 1]))
    saved = iteration_folder(Path(sys.argv[sys.argv.index("--save") + 1]), stop)
    if kind != "saveless":
        saved.mkdir(parents=True, exist_ok=True)
        (saved / FACTS_FILE).touch()
    digest = "1" * 32 if kind == "forgets" and not first else digest
    if last:
        write_folder(folder, [record(1), record(2, params=digest)])
elif kind != "silent":
    write_folder(folder, [record(1), record(2, params=digest)])
"""


def launch(kind: str) -> list[str]:
    return [sys.executable, "-c", LEG, kind]


def test_equal_legs(tmp_path: Path):
    outcome = verify(launch("steady"), tmp_path / "v", runs=3)
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.verdict == "3 legs identical on all 2 common iterations (iterations 1 to 2)"
    assert (tmp_path / "v" / "leg_3.log").read_text() == "hello from leg_3\n"


def test_legs_that_differ_are_named(tmp_path: Path):
    outcome = verify(launch("drifts"), tmp_path, runs=2)
    assert outcome.exit == Exit.DIFFERENT
    assert outcome.verdict == "different: first at iteration 2, in params"
    assert f"A = {tmp_path / 'leg_1'}, B = {tmp_path / 'leg_2'}" in outcome.details[0]


def test_leg_that_fails_shows_its_last_words(tmp_path: Path):
    outcome = verify(launch("fails"), tmp_path, runs=2)
    assert outcome.exit == Exit.DAMAGED
    assert "exit code 1" in outcome.verdict
    assert any("out of luck" in line for line in outcome.details)


def test_a_command_that_trains_nothing_is_told_so_after_its_first_leg(tmp_path: Path):
    for command in (launch("silent"), ["true"]):
        outcome = verify(command, tmp_path / command[-1], runs=2)
        assert outcome.exit == Exit.DAMAGED
        assert outcome.verdict.startswith(f"a leg ended with exit code 0, but trained nothing: {command[0]}")
        assert f"left no {tmp_path / command[-1] / 'leg_1' / 'manifest.json'}" in outcome.details[0]
        assert not (tmp_path / command[-1] / "leg_2.log").exists()


@pytest.mark.parametrize(
    ("name", "lines", "signalled"),
    [("verify", 1, signal.SIGTERM), ("tax", 0, signal.SIGTERM), ("tax", 1, signal.SIGINT)],
)
def test_a_leg_ends_with_the_command(tmp_path: Path, name: str, lines: int, signalled: signal.Signals):
    body = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(900)"
    command = [sys.executable, "-m", "megatron.determinism", name, "--dir", str(tmp_path / "v"), "--"]
    running = subprocess.Popen([*command, sys.executable, "-c", body, str(tmp_path / "leg")], stderr=subprocess.PIPE)
    leg = number_in(tmp_path / "leg")
    running.send_signal(signalled)
    _, said = running.communicate()
    assert (running.returncode, said.count(b"\n")) == (128 + signalled, lines), said
    assert not runs(leg)


def test_command_that_cannot_start(tmp_path: Path):
    outcome = verify([str(tmp_path / "no-such-program")], tmp_path, runs=2)
    assert outcome.exit == Exit.DAMAGED
    assert "could not start" in outcome.verdict


def test_folder_of_earlier_legs_is_left_alone(tmp_path: Path):
    (tmp_path / "leg_2").mkdir()
    outcome = verify(launch("steady"), tmp_path, runs=2)
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "leg_2 exists already" in outcome.verdict
    assert not (tmp_path / "leg_1").exists()


def test_fingerprint_folder_belongs_to_the_legs(tmp_path: Path):
    for words in (["--fingerprint-dir", "x"], ["--fingerprint-dir=x"]):
        assert verify([*launch("steady"), *words], tmp_path, runs=2).exit == Exit.NOT_COMPARABLE


def test_default_folder_carries_the_time():
    assert default_folder(datetime.datetime(2026, 8, 1, 9, 5, 7)) == Path("runs/verify_20260801_090507")


def test_resumed_leg_is_stopped_and_gone_on_with(tmp_path: Path):
    outcome = verify(launch("steady"), tmp_path, runs=1, resume_at=(2, 5))
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.verdict.startswith("2 legs (the last one resumed) identical on all 2")
    parts = [(tmp_path / f"leg_resumed_{n}.log").read_text().split("argv ")[1].split() for n in (1, 2, 3)]
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1000000000"]
    loading = ["--load", str(tmp_path / "checkpoints"), "--exit-on-missing-checkpoint"]
    assert parts[0] == [*saving, "--exit-interval", "2"]
    assert parts[1] == [*saving, *loading, "--exit-interval", "5"]
    assert parts[2] == [*saving, *loading]


def test_resume_that_forgets_something_is_different(tmp_path: Path):
    outcome = verify(launch("forgets"), tmp_path, runs=2, resume_at=(1,))
    assert outcome.exit == Exit.DIFFERENT
    assert "leg_resumed" in outcome.details[0]


@pytest.mark.parametrize(
    ("kind", "stops", "said"),
    [
        ("steady", (2, 9), "nothing was resumed at iteration 9 (the leg's newest checkpoint is that of iteration 7)"),
        ("steady", (7,), "nothing was resumed at iteration 7 (the leg's newest checkpoint is that of iteration 7)"),
        ("saveless", (2,), "nothing was resumed at iteration 2 (the leg left no checkpoint)"),
    ],
)
def test_a_leg_that_was_not_resumed_proves_nothing(tmp_path: Path, kind: str, stops: tuple[int, ...], said: str):
    outcome = verify(launch(kind), tmp_path, runs=1, resume_at=stops)
    assert outcome.exit == Exit.NOT_COMPARABLE, outcome
    assert f"--resume-at {','.join(map(str, stops))}: {said}" in outcome.verdict


@pytest.mark.parametrize("words", [["--train-iters", "9", "--train-iters", "7"], ["--train-iters=7"]])
def test_an_iteration_beyond_the_run_is_refused_before_any_leg(tmp_path: Path, words: list[str]):
    for stops in ((7,), (2, 8)):
        outcome = verify([*launch("steady"), *words], tmp_path / "v", runs=2, resume_at=stops)
        assert outcome.exit == Exit.NOT_COMPARABLE
        assert f"--resume-at {','.join(map(str, stops))} with --train-iters 7" in outcome.verdict
        assert "below 7" in outcome.verdict
    assert not (tmp_path / "v").exists()


def test_saving_belongs_to_the_resumed_leg(tmp_path: Path):
    outcome = verify([*launch("steady"), "--save", "x"], tmp_path / "b", runs=2, resume_at=(1,))
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "--save" in outcome.verdict
