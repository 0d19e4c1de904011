"""The tax by turns: whose turn it is, which rows run together, what the times say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.determinism.tax_legs import BASELINE, DETERMINISTIC
from megatron.training.loop.step import TrainStep
from tests.architecture.sources import ROOT
from tools.bench.tax_rows import NAME, ROWS
from tools.bench.tax_turns import figures, groups_of, seconds_of
from tools.bench.turns_leg import Turns, take_turns, turn_file, turns_of


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
            take_turns(Turns(tmp_path, name, turns_of(name, "ab", 3), 0), 2)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_measures_its_rows(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--tiny", "--rows", "balanced;EP2", "--turns", "3", "--steps", "2"]
    done = subprocess.run([sys.executable, "-m", "tools.bench.tax_turns", *words], cwd=ROOT, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads((tmp_path / f"{NAME}.json").read_text())["rows"]
    assert {name: len(row["pairs"]) for name, row in rows.items()} == {"balanced": 2, "EP2": 2}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
