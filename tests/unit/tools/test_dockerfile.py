"""Dockerfile, without a daemon to build it: what it copies is there, what it installs is pinned, the targets are those
that are documented."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator

from tests.architecture.sources import ROOT

LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text("utf-8")).splitlines()
VERSIONS = "tools/image_versions.txt"
INSTRUCTIONS = ("FROM", "ENV", "WORKDIR", "RUN", "COPY")


def instructions(kind: str) -> list[str]:
    return [line.removeprefix(f"{kind} ") for line in LINES if line.startswith(f"{kind} ")]


def pip_calls() -> Iterator[list[str]]:
    """The words behind ``pip install`` of every call."""
    for run in instructions("RUN"):
        for command in run.split("&&"):
            words = shlex.split(command)
            assert words.index("pip") + 1 == words.index("install")
            yield words[words.index("install") + 1 :]


def pinned() -> dict[str, str]:
    lines = (ROOT / VERSIONS).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_line_is_an_instruction_and_base_images_are_pinned() -> None:
    assert [line for line in LINES if line and not line.startswith(("#", *INSTRUCTIONS))] == []
    for base in instructions("FROM"):
        assert re.fullmatch(r"\S+:\d\S*\d\S* AS \w+", base), base


def test_targets_are_those_of_the_quick_start_and_the_gpu_is_the_default() -> None:
    targets = [base.split()[-1] for base in instructions("FROM")]
    assert targets == ["cpu", "gpu"]
    assert "`--target cpu` without a GPU" in (ROOT / "docs/quick-start.md").read_text("utf-8")


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    for copy in instructions("COPY"):
        *sources, target = copy.split()
        assert target.startswith("./") or (sources, target) == (["."], ".")
        for source in set(sources) - {"."}:
            assert any(path == source or path.startswith(f"{source}/") for path in tracked), source
            assert source not in ignored


def test_every_package_is_pinned_and_nothing_replaces_the_containers_torch() -> None:
    for words in pip_calls():
        assert "--no-cache-dir" in words
        for package in (word for word in words if re.match(r"[a-z]", word)):
            value_of = words[words.index(package) - 1]
            assert "==" in package or value_of in ("--index-url", "--constraint", "--requirement"), package
    gpu = LINES[LINES.index(next(line for line in LINES if line.endswith("AS gpu"))) :]
    assert not any("torch==" in line for line in gpu)
    own = next(words for words in pip_calls() if words[-1] == ".")
    assert {"--no-deps", "--no-build-isolation"} <= set(own)


def test_versions_cover_the_extras_the_images_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in ("data", "observe"):
        for requirement in extras[extra]:
            name, least = requirement.split(">=")
            assert [int(n) for n in pinned()[name].split(".")] >= [int(n) for n in least.split(".")], requirement
    assert {"einops", "transformers"} <= pinned().keys(), "mamba-ssm cannot be imported without them"
