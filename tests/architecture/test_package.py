"""What is installed: every package of megatron and nothing else, with the command that users call."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

from tests.architecture.boundaries import KERNEL_PACKAGES
from tests.architecture.sources import ROOT, files_with

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_package_of_megatron_is_installed_and_nothing_else() -> None:
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {s.path.rpartition("/")[0] for s in files_with(".py") if s.path.startswith("megatron/")}
    packages = {folder.replace("/", ".") for folder in folders}
    assert {name for name in packages if any(fnmatch(name, pattern) for pattern in include)} == packages
    assert all(pattern.startswith("megatron.") for pattern in include)


def test_every_package_below_the_namespace_is_a_regular_one() -> None:
    sources = {s.path for s in files_with(".py") if s.path.startswith("megatron/")}
    folders = {path.rpartition("/")[0] for path in sources}
    assert "megatron/__init__.py" not in sources
    assert not [folder for folder in folders if f"{folder}/__init__.py" not in sources]


def test_command_is_declared_where_it_lives() -> None:
    target = PROJECT["project"]["scripts"]["megatron-determinism"]
    module, _, function = target.partition(":")
    (source,) = [s for s in files_with(".py") if s.module == module]
    assert any(getattr(node, "name", "") == function for node in source.tree.body)


def import_without(packages: set[str], module: str) -> subprocess.CompletedProcess[str]:
    """Import ``module`` in a fresh interpreter in which ``packages`` cannot be imported."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in sorted(packages))
    program = f"import sys; {blocked}import {module}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_training_starts_without_the_optional_packages() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    packages = {re.split("[<>=]", line)[0] for name in ("data", "observe") for line in extras[name]}
    done = import_without(packages | KERNEL_PACKAGES, "megatron.training.loop.pretrain")
    assert done.returncode == 0, done.stderr


def test_missing_package_is_noticed() -> None:
    assert import_without({"numpy"}, "numpy").returncode == 1


def test_torch_is_the_only_heavy_requirement() -> None:
    names = {line.partition(">=")[0] for line in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "torch"}
