"""A folder that another run has used is refused before torch is loaded; a folder of another kind is told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.training.config.manifest import read_manifest, used_folder_problems
from megatron.training.setup.command_line import start_up
from tests.support.fingerprints import record, write_folder
from tests.support.settings import SMALL, effective


def refused(*words: str) -> list[str]:
    """What is wrong with the folder: of fingerprints what the runs differ in."""
    try:
        start_up([*SMALL, *words], {})
    except ConfigError as error:
        (problem,) = error.problems
        return problem.given.rpartition(" of another run: ")[2].split("; ")
    return []


def test_fingerprints_of_another_run_are_refused_early(tmp_path: Path):
    prints = ("--fingerprint-dir", str(tmp_path / "f"))
    assert refused(*prints) == []
    write_folder(tmp_path / "f", [record(1)])
    assert refused(*prints) == refused(*prints, "--log-interval", "7") == []
    assert refused(*prints, "--seed", "7", "--lr", "0.5") == [
        "--lr is 0.001 there and 0.5 here",
        "--seed is 1234 there and 7 here",
    ]
    assert "--micro-batch-size is 1 there and 2 here" in refused(*prints, "--micro-batch-size", "2")
    (tmp_path / "f" / "manifest.json").write_text('{"trajectory": {"recipe": {"new": 1}}, "launches": []}')
    assert "recipe.new is 1 there and None here" in (found := refused(*prints))
    assert len(found) == 6 and found[-1].startswith("and ") and found[-1].endswith(" more")
    (tmp_path / "f" / "manifest.json").write_text("{")
    with pytest.raises(DamagedInputError, match=r"manifest\.json is damaged"):
        start_up([*SMALL, *prints], {})


def test_rows_that_only_the_tokenizer_tells_are_compared_later(tmp_path: Path):
    write_folder(tmp_path, [record(1)])
    words = ("--fingerprint-dir", str(tmp_path), "--padded-vocab-size", "512")
    assert refused(*words[:2]) == []
    assert refused(*words) == [
        "--padded-vocab-size is 384 there and 512 here",
        "--make-vocab-size-divisible-by, --padded-vocab-size is 384 there and 512 here",
    ]


def test_a_schedule_that_is_the_checkpoints_is_compared_later(tmp_path: Path):
    write_folder(tmp_path, [record(1)])
    words = ("--fingerprint-dir", str(tmp_path), "--lr", "0.5", "--load", str(tmp_path / "c"))
    assert used_folder_problems(effective(*words)) != []
    assert used_folder_problems(effective(*words, "--use-checkpoint-opt-param-scheduler")) == []


@pytest.mark.parametrize("name", ["manifest.json", "trace_rank_00003.jsonl"])
def test_a_trace_that_is_there_is_refused_early(name: str, tmp_path: Path):
    assert refused("--trace-dir", str(tmp_path)) == []
    (tmp_path / name).touch()
    assert refused("--trace-dir", str(tmp_path)) == [f"--trace-dir {tmp_path}"]


def test_a_run_folder_is_told_apart_and_what_may_be_meant_is_named(tmp_path: Path):
    with pytest.raises(DamagedInputError, match=r"no such file; name what a run had as --fingerprint-dir"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text(json.dumps({"trajectory": {}, "launch": {}}))
    with pytest.raises(DamagedInputError, match=r"no launches, as in a --run-dir; name what a run had"):
        read_manifest(tmp_path)
    write_folder(tmp_path / "fingerprint", [record(1)])
    (tmp_path / "earlier_1").mkdir()
    (tmp_path / "earlier_1" / "manifest.json").write_text("{}")
    with pytest.raises(DamagedInputError, match=rf"as in a --run-dir; did you mean {tmp_path}/fingerprint\?"):
        read_manifest(tmp_path)
