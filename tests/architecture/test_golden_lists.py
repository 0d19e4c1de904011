"""The generated pages and golden lists match the code, and a stale one is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

GENERATORS = {
    "gen_flags": ("docs/flags.md", "tests/golden/flags.txt"),
    "gen_op_catalog": ("docs/op-catalog.md", "tests/golden/op_manifest.json"),
}


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


@pytest.mark.parametrize("name", GENERATORS)
def test_stale_page_is_noticed_and_rewritten(name: str, tmp_path: Path) -> None:
    root = ("--root", str(tmp_path))
    assert generate(name, "--write", *root).returncode == 0
    right = {path: (tmp_path / path).read_text("utf-8") for path in GENERATORS[name]}
    for path, text in right.items():
        (tmp_path / path).write_text(text.replace("e", "E", 1), "utf-8")
    stale = generate(name, "--check", *root)
    assert stale.returncode == 1
    assert all(path in stale.stderr for path in right)
    assert generate(name, "--write", *root).returncode == 0
    assert {path: (tmp_path / path).read_text("utf-8") for path in right} == right


def test_configuration_is_read_without_torch() -> None:
    program = "import sys, megatron.training.config.run; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
