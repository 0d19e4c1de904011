"""Folders that cannot be folders are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.config.folder_rules import folder_problems
from tests.support.settings import given


@pytest.mark.parametrize("flag", ["--run-dir", "--tensorboard-dir", "--fingerprint-dir", "--trace-dir", "--load"])
def test_a_file_is_no_folder(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        (problem,) = folder_problems(given(flag, str(path)))
        assert flag in str(problem)
        assert str(path) in str(problem)


def test_folders_there_or_not_yet_are_taken(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path), "--fingerprint-dir", str(tmp_path / "a" / "b"), "--load", str(tmp_path / "c")]
    assert folder_problems(given(*flags)) == []
    assert folder_problems(given("--run-dir", "relative/and/new")) == []


def test_one_checkpoint_is_not_the_folder_of_all(tmp_path: Path) -> None:
    one = tmp_path / "iter_0000002"
    one.mkdir()
    (one / "metadata.json").write_text("{}")
    (problem,) = folder_problems(given("--load", str(one)))
    assert f"--load {tmp_path}" in problem.change
    assert "--ckpt-step" in problem.change
