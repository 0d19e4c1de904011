"""The linters find nothing in the tree, and each of them finds what is planted for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, files_with

RUFF_CHECK = ("-m", "ruff", "check", "--no-cache", "--output-format=concise")
RUFF_FORMAT = ("-m", "ruff", "format", "--no-cache", "--check", "--output-format=concise")
MYPY = ("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"))


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, keeping its output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a tool with this interpreter."""
    return run(sys.executable, *arguments, cwd=cwd)


def shellcheck(*scripts: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the shellcheck that is installed beside this interpreter, else the system's."""
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program is not None, "no shellcheck; `bash tools/venv.sh data,observe,oracle,test` brings it"
    return run(program, *scripts, cwd=cwd)


def test_ruff_finds_nothing() -> None:
    done = run_python(*RUFF_CHECK, ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_code_is_formatted() -> None:
    done = run_python(*RUFF_FORMAT, ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_agree() -> None:
    done = run_python(*MYPY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts_are_clean_and_stop_at_errors() -> None:
    scripts = [source for source in files_with(".sh", ".sbatch", ".ci/run", "run") if source.text.startswith("#!")]
    assert {"tests/run.sh", ".ci/run"} <= {script.path for script in scripts}
    loose = [script.path for script in scripts if "set -euo pipefail" not in script.text]
    assert not loose, f"without `set -euo pipefail`: {loose}"
    done = shellcheck(*(script.path for script in scripts))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("from __future__ import annotations\n\nimport os\n", "F401"),
        ("from __future__ import annotations\n\n\ndef f(x=[]) -> list:\n    return x\n", "B006"),
        ("x = 1\n", "I002"),
    ],
)
def test_ruff_sees_the_planted_fault(tmp_path: Path, planted: str, rule: str) -> None:
    (tmp_path / "planted.py").write_text(planted)
    done = run_python(*RUFF_CHECK, "--config", str(ROOT / "pyproject.toml"), str(tmp_path / "planted.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert rule in done.stdout


def test_unformatted_code_is_seen(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("x  =  1\n")
    assert run_python(*RUFF_FORMAT, str(tmp_path / "planted.py")).returncode == 1


@pytest.mark.parametrize(
    ("planted", "code"),
    [
        ("def f(x: int) -> str:\n    return x\n", "return-value"),
        ("def f(x: str) -> str:\n    return x.nowhere\n", "attr-defined"),
    ],
)
def test_mypy_sees_the_planted_fault(tmp_path: Path, planted: str, code: str) -> None:
    (tmp_path / "planted.py").write_text(planted)
    done = run_python(*MYPY, str(tmp_path / "planted.py"), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert code in done.stdout


def test_shellcheck_sees_the_planted_fault(tmp_path: Path) -> None:
    (tmp_path / "planted.sh").write_text("#!/usr/bin/env bash\nrm -r $1\n")
    assert shellcheck(str(tmp_path / "planted.sh")).returncode == 1


def test_every_python_file_is_linted() -> None:
    shown = run_python("-m", "ruff", "check", "--no-cache", "--show-files", ".").stdout.split()
    assert {str(ROOT / source.path) for source in files_with(".py")} <= set(shown)
