"""What a bench starts ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.support.processes import number_in, runs

LAUNCH = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), file=open(sys.argv[1], "w"))
time.sleep(900)
"""
CALLS = """
import sys
from tools.bench import ended
ended.GRACE_S = 0.2
ended.run_to_end([sys.executable, "-c", *sys.argv[1:]])
"""
ONE_NODE = """
import sys
from tools.bench import one_node
body, folder = sys.argv[1:]
one_node.Session.command = lambda self, launch, devices: [sys.executable, "-c", body, f"{folder}/{len(self.running)}"]
sizes = ["--gpus", "2", "--tiny", "--steps", "6", "--stop", "3", "--at-once", "2"]
sys.exit(one_node.main(["--out", f"{folder}/out", *sizes]))
"""


@pytest.mark.parametrize(
    ("program", "words", "launches"),
    [(CALLS, ["0"], ["0"]), (CALLS, ["0", "deaf"], ["0"]), (ONE_NODE, [""], ["0", "1"])],
    ids=["asked", "killed", "one_node"],
)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_launches_end_with_the_bench(
    tmp_path: Path, program: str, words: list[str], launches: list[str], how: signal.Signals
) -> None:
    command = [sys.executable, "-c", program, LAUNCH, str(tmp_path / words[0]), *words[1:]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        numbers = [number_in(tmp_path / name) for name in launches]
        bench.send_signal(how)
    assert bench.returncode in (128 + how, -how)
    assert not any(map(runs, numbers))
