"""Output that nobody reads any more stops no run, and is said once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
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

VERDICT = """
import sys
from megatron.determinism.report import Exit, Outcome
sys.exit(Outcome(exit=Exit.SAME, verdict="identical").print(sys.stdout, as_json=True))
"""

FULL = "error: standard output: [Errno 28] No space left on device\n"


def ended(program: str, *argv: str, cwd: Path, **streams: object) -> tuple[int, str]:
    """Exit code and standard error of a program."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    return done.returncode, done.stderr or ""


def unread(program: str, *argv: str, cwd: Path, closed: tuple[str, ...] = ("stdout",)) -> tuple[int, str]:
    """The same where the output goes into a pipe that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    found = ended(program, *argv, cwd=cwd, **dict.fromkeys(closed, writer))
    os.close(writer)
    return found


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_run_goes_on_and_says_so_once(tmp_path: Path, closed: tuple[str, ...]):
    code, said = unread(TRAIN, *SMALL, cwd=tmp_path, closed=closed)
    assert code == 0, said
    assert (tmp_path / "state").exists()
    if closed == ("stdout",):
        assert said.count("standard output is lost (Broken pipe); the run goes on") == said.count("\n") == 1


def test_a_refusal_keeps_its_exit_code(tmp_path: Path):
    assert unread(TRAIN, *SMALL, "--fp16", cwd=tmp_path, closed=("stdout", "stderr"))[0] == 2


@pytest.mark.parametrize(("program", "argv", "code"), [(TRAIN, ["--help"], 0), (TOOL, [], 5)])
def test_help_and_tools_end_quietly(tmp_path: Path, program: str, argv: list[str], code: int):
    assert unread(program, *argv, cwd=tmp_path) == (code, "")


def test_on_a_full_disk_a_run_goes_on_and_a_tool_fails(tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        code, said = ended(TRAIN, *SMALL, cwd=tmp_path, stdout=full)
        assert (code, said.count("\n")) == (0, 1), said
        assert "standard output is lost (No space left on device)" in said
        assert ended(TOOL, cwd=tmp_path, stdout=full) == (1, FULL)
        code, said = ended(VERDICT, cwd=tmp_path, stdout=full)
        assert (code, said) == (3, FULL)


@pytest.mark.parametrize(("program", "argv", "code"), [(TRAIN, SMALL, 0), (TOOL, [], 5), (VERDICT, [], 0)])
def test_output_that_was_closed_from_the_start_goes_nowhere(tmp_path: Path, program: str, argv: list[str], code: int):
    inner = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {program!r}, *sys.argv[1:]]"
    closing = f"{inner}, close_fds=True, preexec_fn=lambda: [__import__('os').close(n) for n in (1, 2)]).returncode)"
    assert ended(closing, *argv, cwd=tmp_path) == (code, "")


def test_what_an_encoding_has_no_characters_for_is_escaped():
    bare = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    print("r\u00fcn \udcff", file=Outlasting(bare))
    assert bare.buffer.getvalue() == b"r\\xfcn \\udcff\n"


def test_a_stream_with_a_reader_is_as_it_was():
    plain = io.StringIO()
    out = Outlasting(plain)
    assert out.write("words") == 5
    out.flush()
    assert (plain.getvalue(), out.closed) == ("words", False)


@pytest.mark.parametrize("write", [Outlasting.write, Outlasting.writelines])
def test_whatever_writes_lives_on(write: Callable[[Outlasting, str], object]):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as unread:
        write(Outlasting(unread), "a line\n")


def test_threads_have_whole_lines():
    plain = io.StringIO()
    out = Outlasting(plain)
    out.write("one")
    other = threading.Thread(target=print, args=("two",), kwargs={"file": out})
    other.start()
    other.join()
    out.write(" more\nand")
    assert plain.getvalue() == "two\none more\n"


def test_a_line_is_one_write_also_where_nothing_is_buffered(tmp_path: Path):
    """Processes share a pipe, and each write of theirs is one there."""
    reader, writer = os.pipe()
    program = "from megatron.training.setup.closed_pipe import outlasting_readers\n"
    program += "with outlasting_readers():\n    print('one line', 7, flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], cwd=ROOT, stdout=writer, stdin=subprocess.PIPE
    ) as printing:
        os.close(writer)
        assert os.read(reader, 100) == b"one line 7\n"
        printing.communicate(b"\n")
    os.close(reader)
