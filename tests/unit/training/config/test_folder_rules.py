"""Folders that cannot be folders are refused before anything starts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.config.folder_rules import folder_problems, package_problems
from megatron.training.setup.command_line import start_up
from tests.support.settings import SMALL, given

WRITTEN = ("--save", "--run-dir", "--tensorboard-dir", "--fingerprint-dir", "--trace-dir", "--data-cache-path")
READ = ("--load", "--pretrained-checkpoint")


@pytest.mark.parametrize("flag", [*WRITTEN, *READ])
def test_a_file_is_no_folder(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path, reason in (
        (str(file), f"{file}, which is a file"),
        (f"{file}/below", f"{file}/below, which lies below the file {file}"),
        ("", "'', which is empty"),
        ("x" * 300, f"{'x' * 300}, which cannot be looked at (File name too long)"),
    ):
        (problem,) = folder_problems(given(flag, path))
        assert problem.given == f"{flag} {reason}"
        assert problem.change.startswith(flag)
        assert problem.local, "another machine may have a folder there"


@pytest.mark.parametrize("flag", WRITTEN)
def test_a_folder_that_cannot_be_written(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    (problem,) = folder_problems(given(flag, f"{tmp_path}/new"))
    assert problem.given == f"{flag} {tmp_path}/new, where {tmp_path} cannot be written"
    for rank, writes_all in ((0, True), (1, False), (2, True)):
        refused = folder_problems(given(flag, str(tmp_path)), rank, world_size=3)
        assert bool(refused) == (writes_all or flag not in ("--run-dir", "--tensorboard-dir")), "the last rank writes"


@pytest.mark.parametrize("flag", WRITTEN)
def test_a_folder_that_only_trying_shows(flag: str, tmp_path: Path) -> None:
    """The superuser may write everywhere by permission, and yet not here. Trying leaves nothing behind."""
    (problem,) = folder_problems(given(flag, "/proc/x/y"))
    assert problem.given.startswith(f"{flag} /proc/x/y, where /proc cannot be written")
    assert folder_problems(given(flag, str(tmp_path / "new"))) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", WRITTEN)
def test_it_is_said_before_torch_is_loaded(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    words = [*SMALL, "--load", str(file), flag, str(file), *(["--save-interval", "1"] if flag == "--save" else [])]
    with pytest.raises(ConfigError) as refused:
        start_up(words, {})
    assert [problem.given.partition(",")[0] for problem in refused.value.problems] == [
        f"{flag} {file}",
        f"--load {file}",
    ]


@pytest.mark.parametrize(("flag", "package"), [("--run-dir", "matplotlib"), ("--tensorboard-dir", "tensorboard")])
def test_a_package_that_is_not_there(flag: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (flag, str(tmp_path))
    assert package_problems(given(*words)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package_problems(given()) == []
    with pytest.raises(ConfigError, match=f"the package {package}, .* pip install {package}, or leave out {flag}"):
        start_up([*SMALL, *words], {})


@pytest.mark.parametrize("flag", ["--tokenizer-model", "--vocab-file", "--merge-file"])
def test_a_tokenizer_file_that_is_not_there(flag: str, tmp_path: Path) -> None:
    (problem,) = folder_problems(given(flag, f"{tmp_path}/t"))
    assert problem.given == f"{flag} {tmp_path}/t, which is not there"
    assert problem.local
    (tmp_path / "t").write_text("x")
    assert folder_problems(given(flag, f"{tmp_path}/t")) == []


def test_folders_there_or_not_yet_are_taken(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path), "--fingerprint-dir", str(tmp_path / "a" / "b"), "--load", str(tmp_path / "c")]
    assert folder_problems(given(*flags)) == []
    assert folder_problems(given("--run-dir", "relative/and/new")) == []


def test_two_manifests_do_not_share_a_folder(tmp_path: Path) -> None:
    words = ["--run-dir", f"{tmp_path}/a", "--fingerprint-dir", f"{tmp_path}/b/../a", "--trace-dir", f"{tmp_path}/a/t"]
    (problem,) = folder_problems(given(*words))
    assert problem.given == f"--run-dir and --fingerprint-dir {tmp_path}/a"
    assert folder_problems(given(*words[:2], "--fingerprint-dir", f"{tmp_path}/a/f", "--save", f"{tmp_path}/a")) == []
    assert len(folder_problems(given(*words[:4], "--trace-dir", f"{tmp_path}/a"))) == 3


def test_one_checkpoint_is_not_the_folder_of_all(tmp_path: Path) -> None:
    one = tmp_path / "iter_0000002"
    one.mkdir()
    (one / "metadata.json").write_text("{}")
    (problem,) = folder_problems(given("--load", str(one)))
    assert f"--load {tmp_path}" in problem.change
    assert "--ckpt-step" in problem.change
    (problem,) = folder_problems(given("--save", str(one)))
    assert problem.given == f"--save {one}, which is itself one checkpoint"
    assert problem.change == f"--save {tmp_path}"
