"""The manifest: what must agree is in the trajectory, what may differ in the launches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.training.config.manifest import differences, folder_problems, read_manifest
from megatron.training.config.resolve import logical_layout
from megatron.training.observe.fingerprint import rank_file
from megatron.training.observe.run_manifest import prepare_folder, trajectory_part
from tests.support.fingerprints import CIRCUMSTANCES, manifest_parts, record, write_folder
from tests.support.settings import effective

SP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def changed(*flags: str, world_size: int = 1) -> list[str]:
    """Trajectory fields that differ from the plain run's."""
    other = manifest_parts(effective(*flags, world_size=world_size), world_size)[0]
    return [path for path, _, _ in differences(manifest_parts()[0], other)]


def test_trajectory_holds_what_bits_depend_on():
    trajectory, launch = manifest_parts()
    assert list(trajectory) == [
        "recipe", "seed", "data_digest", "logical_layout", "versions", "device", "ops", "environment",
    ]  # fmt: skip
    assert trajectory["seed"] == 1234
    assert trajectory["logical_layout"]["ldp"] == 1
    assert launch["physical_layout"] == {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "edp": 1}
    assert (launch["distributed_backend"], launch["hosts"], launch["promise"]) == ("gloo", ["one"], "LAYOUT")
    assert launch["operational"]["logging"]["log_interval"] == 100


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--seed", "7"], ["seed"]),
        (["--lr", "2e-3"], ["recipe.optimizer.lr"]),
        (["--hidden-dropout", "0.0"], ["recipe.model.hidden_dropout"]),
        (["--log-interval", "1", "--run-dir", "x", "--exit-interval", "2"], []),
        (["--ddp-bucket-size", "1000", "--use-distributed-optimizer"], []),
        (["--data-cache-path", "x", "--num-workers", "0"], []),
        (
            ["--train-iters", "4"],
            [
                "recipe.scheduler.lr_decay_samples",
                "recipe.training.train_iters",
                "recipe.training.train_samples",
            ],
        ),
    ],
)
def test_effect_of_a_flag_decides_where_it_is(flags: list[str], fields: list[str]):
    assert changed(*flags) == fields


def test_stages_are_no_part_of_the_trajectory():
    flags = ("--hybrid-layer-pattern", "M-|*E", "--pipeline-model-parallel-size", "2")
    assert changed(*flags, world_size=2) == []
    assert manifest_parts(effective(*flags, world_size=2), 2)[1]["hybrid_layer_pattern"] == "M-|*E"


def test_logical_layout_is_part_of_the_trajectory():
    assert changed(*SP2, world_size=2) == [
        "recipe.parallel.sequence_parallel",
        "recipe.tokenizer.padded_vocab_size",
        "logical_layout.tp",
        "logical_layout.etp",
        "logical_layout.padded_vocab_size",
    ]


@pytest.mark.parametrize("part", ["data_digest", "versions", "device", "ops", "environment"])
def test_circumstances_are_part_of_the_trajectory(part: str):
    from_here = manifest_parts()[0]
    value = "d2" if part == "data_digest" else {"new": "x"}
    config = effective()
    other = trajectory_part(config, logical_layout(config), dataclasses.replace(CIRCUMSTANCES, **{part: value}))
    assert {path.partition(".")[0] for path, _, _ in differences(from_here, other)} == {part}


def test_differences_name_leaves():
    left = {"a": {"b": 1, "c": [1, 2]}, "d": True, "e": 1}
    right = {"a": {"b": 2, "c": [1, 3]}, "d": 1, "f": "x", "e": 1.0}
    assert differences(left, right) == [("a.b", 1, 2), ("a.c", [1, 2], [1, 3]), ("d", True, 1), ("f", None, "x")]


def test_launches_are_appended(tmp_path: Path):
    trajectory, launch = manifest_parts()
    for start in (0, 5):
        assert folder_problems(tmp_path / "f", trajectory, launch["operational"]) == []
        prepare_folder(tmp_path / "f", trajectory, {**launch, "start_iteration": start})
    manifest = read_manifest(tmp_path / "f")
    assert manifest["trajectory"] == trajectory
    assert [entry["start_iteration"] for entry in manifest["launches"]] == [0, 5]
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["manifest.json"]


def test_other_trajectory_is_refused_with_both_values(tmp_path: Path):
    write_folder(tmp_path, [record(1)])
    trajectory, launch = manifest_parts(effective("--seed", "7"))
    (problem,) = folder_problems(tmp_path, trajectory, launch["operational"])
    assert problem.given.endswith("with the fingerprint of another run: --seed is 1234 there and 7 here")
    assert "another --fingerprint-dir" in problem.change


BLEND = ("--no-mock-data", "--split", "9,1,0", "--data-path", "0.3", "a", "0.7", "b")
DIGEST = "data_digest is d1 there and d2 here"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), [DIGEST]),
        (("--lr", "2"), ["--lr is 0.001 there and 2.0 here", DIGEST]),
        (("--data-path", "0.5", "a", "0.5", "b"), ["--data-path is 0.3 a 0.7 b there and 0.5 a 0.5 b here"]),
        (("--split", "1,1,1"), ["--split is 9,1,0 there and 1,1,1 here"]),
    ],
)
def test_other_data_are_named_by_what_chooses_them(tmp_path: Path, words: tuple[str, ...], named: list[str]):
    """The digest is for where nothing of that differs."""
    write_folder(tmp_path, [record(1)], effective(*BLEND))
    trajectory, launch = manifest_parts(effective(*BLEND, *words))
    (problem,) = folder_problems(tmp_path, {**trajectory, "data_digest": "d2"}, launch["operational"])
    assert problem.given.partition(" of another run: ")[2].split("; ") == named


def test_rank_files_of_another_layout_are_moved_aside(tmp_path: Path):
    write_folder(tmp_path, [record(1)])
    (tmp_path / rank_file(1)).write_text("")
    trajectory, launch = manifest_parts()
    prepare_folder(tmp_path, trajectory, launch)
    assert (tmp_path / rank_file(0)).exists()
    prepare_folder(tmp_path, trajectory, {**launch, "physical_layout": {**launch["physical_layout"], "pp": 2}})
    assert not list(tmp_path.glob("rank_*"))
    assert sorted(path.name for path in (tmp_path / "launch_1").iterdir()) == [rank_file(0), rank_file(1)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"trajectory": {}}', '{"trajectory": 1, "launches": []}'])
def test_damaged_manifest_is_named(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DamagedInputError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_missing_manifest_is_named(tmp_path: Path):
    with pytest.raises(DamagedInputError, match=r"manifest\.json: no such file"):
        read_manifest(tmp_path / "nowhere")


def test_manifest_is_plain_json(tmp_path: Path):
    write_folder(tmp_path, [record(1)])
    assert json.loads((tmp_path / "manifest.json").read_text()) == read_manifest(tmp_path)
