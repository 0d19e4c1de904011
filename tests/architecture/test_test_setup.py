"""The test runner and the settings every test starts from."""

from __future__ import annotations

import fnmatch
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from tests.architecture.sources import ROOT


def run_gpu_suite(folder: Path, python3: str) -> subprocess.CompletedProcess[str]:
    """``tests/run.sh -m gpu -x`` where ``python3`` is the given shell script."""
    (folder / "python3").write_text(f"#!/bin/sh\n{python3}\n")
    (folder / "python3").chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / "tests/run.sh"), "-m", "gpu", "-x"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_gpu_suite_is_refused_where_python3_has_no_cuda(tmp_path: Path) -> None:
    done = run_gpu_suite(tmp_path, "exit 1")
    assert done.returncode == 1
    assert "needs a python3 whose torch sees a CUDA device" in done.stderr


def test_gpu_suite_runs_pytest_of_that_python3_and_keeps_its_exit_code(tmp_path: Path) -> None:
    done = run_gpu_suite(tmp_path, '[ "$1" = -c ] && exit 0; echo "$@" "$OMP_NUM_THREADS"; exit 5')
    assert done.returncode == 5
    assert done.stdout == "-m pytest -m gpu -x 1\n"


def pytest_arguments(folder: Path, *arguments: str) -> list[str]:
    """What ``tests/run.sh`` with these arguments hands to pytest, in a tree whose Python says what it was given."""
    for path, text in {"tools/venv.sh": "", ".venv/bin/python": '#!/bin/sh\necho "$OMP_NUM_THREADS" "$@"\n'}.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    (folder / "tests").mkdir()
    script = shutil.copy(ROOT / "tests/run.sh", folder / "tests")
    done = subprocess.run(["bash", script, *arguments], capture_output=True, text=True, timeout=60, check=True)
    threads, *words = done.stdout.split(" ")
    assert (threads, words[:2]) == ("1", ["-m", "pytest"])
    return " ".join(words[2:]).split()


def test_whole_run_is_side_by_side_by_files(tmp_path: Path) -> None:
    words = pytest_arguments(tmp_path)
    assert words[:6] == ["-m", "not", "gpu", "and", "not", "slow"]
    assert words[6:] == ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]


@pytest.mark.parametrize("given", [["tests/unit", "-k", "norm"], ["-x"]])
def test_arguments_go_to_one_process(tmp_path: Path, given: list[str]) -> None:
    assert pytest_arguments(tmp_path, *given) == ["-m", "not", "gpu", "and", "not", "slow", *given]


def test_ci_runs_what_developers_run() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-1] == "exec bash tests/run.sh </dev/null"


def left_out(patterns: list[str], folders: set[str]) -> set[str]:
    """Names of folders that pytest would not enter."""
    return {name for name in folders for pattern in patterns if fnmatch.fnmatch(name, pattern)}


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders that it does not enter has names that are ours: ``dist``, ``build``."""
    folders = {part for path in (ROOT / "tests").rglob("test_*.py") for part in path.relative_to(ROOT).parts[:-1]}
    assert "dist" in folders
    assert left_out(pytestconfig.getini("norecursedirs"), folders) == set()
    assert left_out(["*.egg", ".*", "build", "dist"], folders) == {"dist"}


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.empty(1000).isnan().all()


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_every_test_starts_from_the_same_seeds() -> None:
    drawn = (random.random(), numpy.random.rand(), torch.rand(()).item())
    assert drawn == (random.Random(1234).random(), numpy.random.RandomState(1234).rand(), seeded_draw(1234))


def seeded_draw(seed: int) -> float:
    """The first uniform draw of a torch generator with that seed."""
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
