"""The reason of a failed run is found in front of what the launcher writes about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.determinism.leg_log import read_failure
from megatron.determinism.verify import run_leg

PLACE = "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/api.py"
TRAILER = f"""\
W1129 23:59:44.812000 13699 {PLACE}:1028] Sending process 13847 closing signal SIGTERM
E1129 23:59:44.817000 13699 {PLACE}:1002] failed (exitcode: 3) local_rank: 1 (pid: 13846) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_hybrid.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_23:59:44
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 13847)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_23:59:44
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 13846)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
REFUSED = "error: configuration refused, 2 problems:\n  1. given a; needed: b; change: c\n  2. given d\n"


def log_of(folder: Path, text: str) -> Path:
    path = folder / "log.txt"
    path.write_text(text)
    return path


def test_words_and_exit_code_are_the_ranks_not_the_launchers(tmp_path: Path) -> None:
    failure = read_failure(log_of(tmp_path, f"building\n{REFUSED}and more\n{TRAILER}"), 1)
    assert failure.code == 3
    assert failure.explained
    assert "\n".join(failure.words) + "\n" == REFUSED


def test_what_several_ranks_say_is_said_once(tmp_path: Path) -> None:
    text = "error on rank 1: c.bin: cut short\nerror on rank 0: c.bin: cut short\nerror on rank 2: other\n"
    assert read_failure(log_of(tmp_path, text), 3).words == (
        "error on rank 1: c.bin: cut short",
        "error on rank 2: other",
    )


def test_without_a_message_the_end_of_the_output_counts(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(30)) + "ValueError: out of luck\n"
    failure = read_failure(log_of(tmp_path, text + TRAILER), 1)
    assert not failure.explained
    assert failure.words == (*(f"line {n}" for n in range(16, 30)), "ValueError: out of luck")
    assert read_failure(log_of(tmp_path, text), -11).code == -11
    text += "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n"
    assert len(read_failure(log_of(tmp_path, text), 1).words) == 3


def test_a_leg_that_fails_is_explained(tmp_path: Path) -> None:
    outcome = run_leg(
        [sys.executable, "-c", f"import sys; print({REFUSED + TRAILER!r}); sys.exit(1)"], tmp_path / "log"
    )
    assert outcome is not None
    assert "exit code 3" in outcome.verdict
    assert "it says" in outcome.details[0]
    assert [line.strip() for line in outcome.details[1:]] == [line.strip() for line in REFUSED.splitlines()]


def test_torchrun_of_this_torch_is_understood(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('ValueError: out of luck', file=sys.stderr, flush=True)\nsys.exit(3)\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    outcome = run_leg([*launcher, str(program)], tmp_path / "log")
    assert outcome is not None
    assert "exit code 3" in outcome.verdict
    assert outcome.details[1:] == ("  ValueError: out of luck",)


@pytest.mark.parametrize("text", [REFUSED + TRAILER, "Segmentation fault\n"])
def test_on_the_command_line(tmp_path: Path, text: str) -> None:
    command = [sys.executable, "-m", "megatron.determinism.leg_log", str(log_of(tmp_path, text)), "139"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (f"3\n{REFUSED}" if "refused" in text else f"139\n{text}")
