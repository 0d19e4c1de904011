"""Output that nobody reads any more stops no run, and is said once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.setup.closed_pipe import Outlasting
from tests.support.settings import SMALL

ROOT = Path(__file__).resolve().parents[4]
TRAIN = """
import sys
from megatron.training.setup.command_line import checked_config, exit_code_of
config = checked_config(sys.argv[1:])
def run(config):
    print("line" * 50000, flush=True)
    print("more")
    open("state", "w").close()
sys.exit(exit_code_of(run, config))
"""
TOOL = """
import sys
from tools.command_line import run_tool
def main(argv):
    print("found")
    return 5
sys.exit(run_tool(main, []))
"""


def unread(program: str, *argv: str, cwd: str, closed: tuple[str, ...] = ("stdout",)) -> tuple[int, str]:
    """Exit code and standard error of a program whose output goes into a pipe that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **dict.fromkeys(closed, writer)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=cwd, env={**os.environ, "PYTHONPATH": path}, text=True, **streams
    )
    os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_run_goes_on_and_says_so_once(tmp_path: Path, closed: tuple[str, ...]):
    code, said = unread(TRAIN, *SMALL, cwd=str(tmp_path), closed=closed)
    assert code == 0, said
    assert (tmp_path / "state").exists()
    if closed == ("stdout",):
        assert said.count("nobody reads standard output any more; the run goes on") == said.count("\n") == 1


def test_a_refusal_keeps_its_exit_code(tmp_path: Path):
    assert unread(TRAIN, *SMALL, "--fp16", cwd=str(tmp_path), closed=("stdout", "stderr"))[0] == 2


@pytest.mark.parametrize(("program", "argv", "code"), [(TRAIN, ["--help"], 0), (TOOL, [], 5)])
def test_help_and_tools_end_quietly(tmp_path: Path, program: str, argv: list[str], code: int):
    assert unread(program, *argv, cwd=str(tmp_path)) == (code, "")


def test_a_stream_with_a_reader_is_as_it_was():
    plain = io.StringIO()
    assert Outlasting(plain).write("words") == 5
    assert (plain.getvalue(), Outlasting(plain).closed) == ("words", False)
