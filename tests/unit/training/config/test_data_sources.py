"""Data sets behind the flags: each once, and refused before anything starts where a file is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.training.config.data import DataConfig
from megatron.training.config.data_sources import data_sources, require_data_files
from megatron.training.setup.command_line import start_up
from tests.support.settings import SMALL


@pytest.fixture
def whole(tmp_path: Path) -> str:
    """The prefix of a data set with both files; nobody looks into them."""
    for ending in (".idx", ".bin"):
        (tmp_path / f"whole{ending}").touch()
    return str(tmp_path / "whole")


def configs(prefix: str, folder: Path) -> list[DataConfig]:
    """Every way to name a data set."""
    (folder / "words").write_text(f"0.5 {prefix} 0.5 {prefix}")
    (folder / "per_split.json").write_text(json.dumps({"train": [prefix], "valid": [prefix]}))
    return [
        DataConfig(data_path=(prefix,)),
        DataConfig(data_path=("1", prefix, "2", prefix)),
        DataConfig(train_data_path=(prefix,)),
        DataConfig(train_data_path=(prefix,), test_data_path=("1", prefix)),
        DataConfig(data_args_path=str(folder / "words")),
        DataConfig(per_split_data_args_path=str(folder / "per_split.json")),
    ]


def test_each_data_set_is_named_once():
    assert data_sources(DataConfig(data_path=("a", "b", "a"))).prefixes == ("a", "b")
    assert data_sources(DataConfig(train_data_path=("b",), test_data_path=("1", "c", "2", "b"))).prefixes == ("b", "c")


def test_missing_files_are_named_with_their_flag(whole: str, tmp_path: Path):
    for config in configs(whole, tmp_path):
        require_data_files(config)
    Path(f"{whole}.bin").unlink()
    for config in configs(whole, tmp_path):
        with pytest.raises(DamagedInputError) as caught:
            require_data_files(config)
        assert str(caught.value) == (
            f"{whole}.bin: no such file; the data set {whole} needs both; "
            f"change {' or '.join(config.given_sources())}, or make the data set again"
        )


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
def test_a_file_of_arguments_that_is_no_text_or_empty_is_refused(tmp_path: Path, flag: str):
    path, named = tmp_path / "words", f"--{flag.replace('_', '-')} {tmp_path}/words, which is"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"given {named} not text \(byte 0: invalid start byte\)"):
        data_sources(DataConfig(**{flag: str(path)}))
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=rf"given {named} (empty|not JSON)"):
        data_sources(DataConfig(**{flag: str(path)}))


def test_an_empty_prefix_is_refused():
    (problem,) = DataConfig(data_path=("0.5", "a", "0.5", " ")).problems()
    assert (
        str(problem) == "given an empty word behind --data-path; needed: the prefix of a data set; change: --data-path"
    )


def test_all_that_is_missing_is_named(whole: str, tmp_path: Path):
    with pytest.raises(DamagedInputError) as caught:
        require_data_files(DataConfig(data_path=(str(tmp_path / "a"), whole, str(tmp_path / "b"))))
    assert all(f"{tmp_path}/{name}" in str(caught.value) for name in ("a.idx", "a.bin", "b.idx", "b.bin"))


def test_nothing_is_looked_for_where_data_are_made_up():
    require_data_files(DataConfig(mock_data=True))


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_it_is_said_before_torch_is_loaded_also_by_a_dry_run(dry: tuple[str, ...], whole: str, tmp_path: Path):
    words = [*(word for word in SMALL if word != "--mock-data"), *dry]
    assert start_up([*words, "--data-path", whole], {}).config.data.data_path == (whole,)
    with pytest.raises(DamagedInputError, match=r"none\.idx and .*none\.bin: no such file.*change --data-path"):
        start_up([*words, "--data-path", str(tmp_path / "none")], {})
    with pytest.raises(ConfigError, match="a file that exists"):
        start_up([*words, "--data-args-path", str(tmp_path / "none")], {})
