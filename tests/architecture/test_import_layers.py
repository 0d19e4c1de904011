"""The import contracts of .importlinter hold, cover every package, and are broken by a planted import."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

CONTRACTS = ROOT / ".importlinter"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts on the package ``megatron`` that lies in ``folder``."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    return subprocess.run(
        [*command, "--no-cache", "--no-logo", str(CONTRACTS)],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def contract_packages() -> dict[str, set[str]]:
    """The names each contract of .importlinter lists, by contract."""
    parser = configparser.ConfigParser()
    parser.read(CONTRACTS)
    listed = {}
    for section in parser.sections():
        lines = "\n".join(parser[section].get(key, "") for key in ("layers", "source_modules", "forbidden_modules"))
        listed[section.rpartition(":")[2]] = {name.strip("()") for name in lines.replace("|", " ").split()}
    return listed


def subpackages(package: str) -> set[str]:
    """Names of the packages directly under ``megatron/package``."""
    return {path.parent.name for path in (ROOT / "megatron" / package).glob("*/__init__.py")}


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_of_core_has_a_layer() -> None:
    contracts = contract_packages()
    shared = contracts["model-side"] & contracts["engine-side"]
    for side, ban in (("model-side", "model-without-engine"), ("engine-side", "engine-without-model")):
        banned = {name.rpartition(".")[2] for name in contracts[ban]}
        assert (contracts[side] - shared) & subpackages("core") <= banned
    assert subpackages("core") <= contracts["model-side"] | contracts["engine-side"]


def test_every_package_of_training_has_a_layer() -> None:
    assert subpackages("training") <= contract_packages()["training-layers"]


@pytest.fixture(scope="module")
def stub_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every package that a contract names, each holding nothing but its ``__init__.py``."""
    folder = tmp_path_factory.mktemp("stubs") / "megatron"
    names = {name for listed in contract_packages().values() for name in listed}
    dotted = {name.removeprefix("megatron.") for name in names if name.startswith("megatron.")}
    dotted |= {f"training.{name}" for name in contract_packages()["training-layers"]}
    dotted |= {f"core.{name}" for name in contract_packages()["model-side"]}
    for name in dotted:
        stub = folder.joinpath(*name.split("."), "__init__.py")
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.touch()
    return folder.parent


def test_contracts_hold_on_stubs(stub_tree: Path) -> None:
    done = lint_imports(stub_tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("where", "statement"),
    [
        ("core/ssm", "import megatron.core.transformer"),
        ("core/contracts", "import megatron.core.process_groups"),
        ("core/transformer", "import megatron.core.optimizer"),
        ("core/datasets", "import megatron.core.models"),
        ("core/optimizer", "import megatron.core.distributed"),
        ("core/config", "import torch"),
        ("core/rng", "import megatron.training.config"),
        ("training/config", "import megatron.training.setup"),
        ("training/loop", "import megatron.determinism"),
    ],
)
def test_planted_import_is_refused(stub_tree: Path, tmp_path: Path, where: str, statement: str) -> None:
    shutil.copytree(stub_tree, tmp_path, dirs_exist_ok=True)
    (tmp_path / "megatron" / where / "planted.py").write_text(statement + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken" in done.stdout.lower()
