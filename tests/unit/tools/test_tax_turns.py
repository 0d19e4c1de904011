"""The tax by turns: whose turn it is, which rows run together, what the times say."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.determinism.tax_legs import BASELINE, DETERMINISTIC
from megatron.training.loop.step import TrainStep
from tests.architecture.sources import ROOT
from tests.support.processes import number_in, runs
from tools.bench.tax_rows import NAME, ROWS
from tools.bench.tax_turns import NAMES, figures, groups_of, seconds_of
from tools.bench.turns_leg import Turns, starter_file, take_turns, turn_file, turns_of


def test_turns_go_forward_and_backward_and_none_is_left_out() -> None:
    numbers = {name: list(turns_of(name, "ab", 4)) for name in "ab"}
    assert numbers == {"a": [0, 3, 4, 7], "b": [1, 2, 5, 6]}


@pytest.mark.parametrize(("gpus", "groups"), [(1, [1, 1, 1, 1, 1]), (2, [2, 1, 1, 1]), (4, [3, 2]), (8, [5])])
def test_rows_share_the_machine_where_they_fit(gpus: int, groups: list[int]) -> None:
    assert [len(group) for group in groups_of(ROWS, gpus)] == groups


def test_two_launches_step_one_at_a_time_and_leave_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for launches: each has a step of its own, as each process has."""
    done: list[str] = []

    def leg(name: str) -> None:
        step = lambda *_: done.append(name)  # noqa: E731
        with lock:
            monkeypatch.setattr(TrainStep, "run", step)
            take_turns(Turns(tmp_path, name, turns_of(name, "ab", 3), 0), 3, 2)
            mine = TrainStep.run
        for _ in range(1 + 3 * 2):
            mine(None)

    lock = threading.Lock()
    threads = [threading.Thread(target=leg, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    turn_file(tmp_path, 0).touch()
    for thread in threads:
        thread.join(30)
    steps = list(done)
    for name in "ab":
        # The first of each waits for nobody.
        steps.remove(name)
    assert "".join(steps) == "aabbbbaaaabb"
    assert [len(seconds_of(tmp_path, name)) for name in "ab"] == [3, 3]
    assert turn_file(tmp_path, 6).exists()


def test_figures_are_those_of_paired_turns() -> None:
    slow, fast = [1.02, 1.04, 1.01, 1.03, 1.02, 1.02], [1.0] * 6
    row = figures(ROWS[0], {DETERMINISTIC: slow, BASELINE: fast})
    assert row["tax"] == pytest.approx(0.02)
    assert row["interval"] == pytest.approx((0.01, 0.04))
    assert (row["verdict"], row["status"]) == ("over", "measured")
    assert figures(ROWS[0], {DETERMINISTIC: fast, BASELINE: fast})["verdict"] == "within"


# The tool, with launches that never take a turn, and one of them failing where its name is given. Each writes its id.
SLEEPERS = """
import sys
from pathlib import Path
from tools.bench import tax_turns

folder, fails = Path(sys.argv.pop(1)), sys.argv.pop(1)
BODY = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(900)"

def launch_of(row, iterations, *, tiny, wrapper):
    name = wrapper[4]
    if name == fails:
        return [sys.executable, "-c", "raise SystemExit('out of luck')"]
    return [sys.executable, "-c", BODY, str(folder / name)]

tax_turns.launch_of = launch_of
sys.exit(tax_turns.main(sys.argv[1:]))
"""


def sleepers(folder: Path, fails: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLEEPERS, str(folder), fails, "--out", str(folder / "out"), "--tiny"]
    return subprocess.Popen(
        [*command, "--rows", "balanced", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_launches_end_with_the_tool(tmp_path: Path) -> None:
    tool = sleepers(tmp_path, "")
    ids = [number_in(tmp_path / name) for name in NAMES]
    tool.send_signal(signal.SIGTERM)
    assert tool.wait() == 128 + signal.SIGTERM
    assert not any(map(runs, ids))


def test_a_launch_that_fails_takes_the_other_with_it(tmp_path: Path) -> None:
    """Also before the first turn, and the limit counts there too."""
    said, _ = sleepers(tmp_path, BASELINE, "--after", str(tmp_path / "never")).communicate()
    assert "balanced   out of luck" in said
    said, _ = sleepers(tmp_path, "", "--after", str(tmp_path / "never"), "--limit-s", "1").communicate()
    assert "balanced   no time for two turns of each" in said


def test_a_launch_that_nobody_would_end_ends_by_itself(tmp_path: Path) -> None:
    turns = Turns(tmp_path, "a", turns_of("a", "ab", 2), 0)
    with starter_file(tmp_path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        turn_file(tmp_path, 0).touch()
        turns.begin()
    with pytest.raises(SystemExit, match="is gone"):
        turns.begin()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_measures_its_rows(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--tiny", "--rows", "balanced;EP2", "--turns", "3", "--steps", "2"]
    done = subprocess.run([sys.executable, "-m", "tools.bench.tax_turns", *words], cwd=ROOT, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads((tmp_path / f"{NAME}.json").read_text())["rows"]
    assert {name: len(row["pairs"]) for name, row in rows.items()} == {"balanced": 2, "EP2": 2}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
