"""examples/fleet_health.sh: a healthy machine passes; one that flips a bit is named, with the device."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def fleet_health(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {"STEPS": "3", "REPEATS": "1", "DIR": str(folder), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(ROOT / "examples/fleet_health.sh"), "--global-batch-size", "2", "--lr-warmup-iters", "1"],
        env={**inherited, **given, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_healthy_machine_passes_and_its_results_are_kept(tmp_path: Path):
    done = fleet_health(tmp_path / "fleet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"healthy: {socket.gethostname()}, 2 devices, 1 runs of 3 steps each")
    again = fleet_health(tmp_path / "fleet")
    assert again.returncode == 2
    reference = tmp_path / "fleet" / socket.gethostname() / "device_0_run_1"
    other = fleet_health(tmp_path / "other", DEVICES="1", REFERENCE=str(reference))
    assert other.returncode == 0, other.stdout + other.stderr


@pytest.mark.parametrize("flip", ["40", "1"])
def test_a_machine_that_flips_a_bit_is_named(tmp_path: Path, flip: str):
    done = fleet_health(
        tmp_path / "fleet", DEVICES="1", PYTHON=f"{sys.executable} -m tests.support.faulty_machine", FLIP=flip
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stdout.startswith(f"FAILED {socket.gethostname()}, device 0: ")
    assert "silent data corruption" in done.stdout
    assert f"rank 0 on {socket.gethostname()}" in done.stdout
