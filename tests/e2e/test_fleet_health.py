"""examples/fleet_health.sh: a healthy machine passes; one that flips a bit or crashes is named, with the device; a
command that cannot start says nothing of a machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

HOST = socket.gethostname()
LONG = pytest.mark.timeout(1800)
"""Several launches in a row, each of which takes a minute on a machine that is busy otherwise."""


def fleet_health(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {"STEPS": "3", "REPEATS": "1", "DIR": str(folder), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(ROOT / "examples/fleet_health.sh"), "--global-batch-size", "2", "--lr-warmup-iters", "1", *flags],
        env={**inherited, **given, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@LONG
def test_a_healthy_machine_passes_and_its_results_are_kept(tmp_path: Path):
    done = fleet_health(tmp_path / "fleet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"healthy: {HOST}, 2 devices, 1 runs of 3 steps each")
    again = fleet_health(tmp_path / "fleet")
    assert again.returncode == 2
    assert "is there already: remove it, or name another folder: DIR=" in again.stderr
    reference = tmp_path / "fleet" / HOST / "device_0_run_1"
    other = fleet_health(tmp_path / "other", DEVICES="1", REFERENCE=str(reference))
    assert other.returncode == 0, other.stdout + other.stderr


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("flip", ["40", "1"])
def test_a_machine_that_flips_a_bit_is_named(tmp_path: Path, flip: str):
    done = fleet_health(
        tmp_path / "fleet", DEVICES="1", PYTHON=f"{sys.executable} -m tests.support.faulty_machine", FLIP=flip
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stdout.startswith(f"FAILED {HOST}, device 0: ")
    assert "silent data corruption" in done.stdout
    assert f"rank 0 on {HOST}" in done.stdout


def test_a_flag_that_is_refused_is_no_sick_device(tmp_path: Path):
    done = fleet_health(tmp_path / "fleet", "--hidden-sise", "8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "\nfleet_health: the command could not start (exit code 2):\nerror: configuration refu" in done.stderr
    assert done.stderr.count("--hidden-sise") == 1
    assert not (tmp_path / "fleet" / HOST).exists(), "the folder can be named again"


# In place of Python: a training run that says SAYS and ends with CODE; this package's commands are run.
STAND_IN = """
import os, runpy, sys
if sys.argv[1:3] == ["-m", "megatron.determinism.leg_log"]:
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    print(os.environ["SAYS"])
    sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize(
    ("code", "says", "sick"),
    [
        ("3", "error on rank 0: corpus.bin: no such file", False),
        ("1", "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'", False),
        ("4", "error on rank 0: iteration 1: (silent data corruption)", True),
        ("1", "Traceback (most recent call last):\nRuntimeError: CUDA error: an illegal memory access", True),
        ("139", "Segmentation fault", True),
    ],
)
def test_what_a_run_that_failed_says_of_the_device(tmp_path: Path, code: str, says: str, sick: bool):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = f"{sys.executable} {tmp_path}/stand_in.py"
    done = fleet_health(tmp_path / "fleet", DEVICES="1", PYTHON=python, CODE=code, SAYS=says)
    reason = says.splitlines()[-1]
    if sick:
        assert done.returncode == 4, done.stderr
        assert done.stdout == f"FAILED {HOST}, device 0: {reason} (exit code {code})\n"
    else:
        assert done.returncode == 2, done.stdout
        assert done.stdout == ""
        begins, reason = done.stderr.split("\n", 1)
        assert re.match(
            r"fleet_health: after \d+ s: run 1 of 1, 3 steps on every device by itself \(1 in all\);", begins
        )
        assert reason == f"fleet_health: the command could not start (exit code {code}):\n{says}\n"


def test_a_command_that_trains_nothing_is_not_healthy(tmp_path: Path):
    done = fleet_health(tmp_path / "fleet", "--dry-run", DEVICES="1")
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert "trained nothing (leave --dry-run" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [{"DEVICES": "0"}, {"DEVICES": "all"}, {"REPEATS": "0"}, *({"PYTHON": p} for p in ("/no/python", "true", "false"))],
)
def test_a_test_of_nothing_is_refused(tmp_path: Path, settings: dict[str, str]):
    done = fleet_health(tmp_path / "fleet", **settings)
    assert done.returncode == 2
    assert next(iter(settings.values())) in done.stderr
    assert not (tmp_path / "fleet").exists()
