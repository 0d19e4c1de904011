"""The generated pages and golden lists match the code, and a stale one is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tools.docs.generated import write_or_check

GENERATORS = ("gen_flags", "gen_op_catalog", "gen_compat", "gen_determinism")


def generate(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"tools/docs/{name}.py", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_pages_are_fresh(name: str) -> None:
    done = generate(name, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_stale_page_is_noticed_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"docs/a.txt": "# A\n", "tests/golden/b.txt": "--b | int\n"}
    root = ["--root", str(tmp_path)]
    assert write_or_check(pages, ["--check", *root]) == 1
    assert write_or_check(pages, ["--write", *root]) == 0
    assert write_or_check(pages, ["--check", *root]) == 0
    (tmp_path / "docs/a.txt").write_text("# a\n")
    capsys.readouterr()
    assert write_or_check(pages, ["--check", *root]) == 1
    said = capsys.readouterr().err
    assert "docs/a.txt" in said
    assert "tests/golden/b.txt" not in said
    assert write_or_check(pages, ["--write", *root]) == 0
    assert (tmp_path / "docs/a.txt").read_text() == pages["docs/a.txt"]


def test_changed_default_of_a_flag_is_noticed(tmp_path: Path) -> None:
    root = ("--root", str(tmp_path))
    assert generate("gen_flags", "--write", *root).returncode == 0
    golden = tmp_path / "tests/golden/flags.txt"
    changed = golden.read_text("utf-8").replace("--adam-beta1 | float | 0.9 |", "--adam-beta1 | float | 0.95 |")
    golden.write_text(changed, "utf-8")
    stale = generate("gen_flags", "--check", *root)
    assert stale.returncode == 1
    assert "tests/golden/flags.txt" in stale.stderr


def test_configuration_is_read_without_torch() -> None:
    program = "import sys, megatron.training.config.run; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
