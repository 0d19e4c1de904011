"""The folder of a run over several launches: nothing that is there is lost, and what goes on stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.observe.curves import draw_curves
from megatron.training.observe.observers import MetricsFile
from megatron.training.observe.run_folder import prepare_run_folder
from megatron.training.observe.trace_writer import TraceWriter


def manifest(**recipe: Any) -> dict[str, Any]:
    return {"trajectory": {"recipe": {"optimizer": recipe}, "seed": 1}, "launch": {}}


def branched(before: dict[str, Any], iteration: int, lr: float, *, seed: int = 1, skip: bool = False) -> dict[str, Any]:
    """The manifest of a launch from a checkpoint of the run of another, with other settings."""
    was = before["trajectory"]
    changed = {"recipe.optimizer.lr": [was["recipe"]["optimizer"]["lr"], lr], "seed": [was["seed"], seed]}
    branch = {"iteration": iteration, "why": ["settings"], "changed": changed}
    now = {"recipe": {"optimizer": {"lr": lr}}, "seed": seed, "branches": [*was.get("branches", ()), branch]}
    return {"trajectory": now, "launch": {"operational": {"training": {"skip_train": skip}}}}


def start(folder: Path, iteration: int, to: int, of: dict[str, Any] | None = None, **recipe: Any) -> str | None:
    """A launch that trains iterations after ``iteration`` up to ``to``, draws its picture and ends."""
    words = prepare_run_folder(folder, of or manifest(**recipe), start_iteration=iteration)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"iteration": n, "of": recipe}) + "\n" for n in range(iteration + 1, to + 1))
    (folder / "curves.png").write_text(f"{recipe} to {to}")
    return words


def iterations(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_launches_that_go_on_share_the_folder(tmp_path: Path) -> None:
    assert start(tmp_path / "new" / "run", 0, 2, lr=1.0) is None
    assert start(tmp_path / "new" / "run", 2, 4, lr=1.0) is None
    assert iterations(tmp_path / "new" / "run") == [1, 2, 3, 4]
    assert sorted(p.name for p in (tmp_path / "new" / "run").iterdir()) == [
        "curves.png",
        "manifest.json",
        "metrics.jsonl",
    ]


def test_records_that_are_made_again_are_kept(tmp_path: Path) -> None:
    start(tmp_path, 0, 5, lr=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "cut of')
    words = start(tmp_path, 3, 6, lr=1.0)
    assert words == (
        f"{tmp_path} was that of an earlier launch: 2 records after iteration 3, manifest and picture moved to "
        f"{tmp_path}/earlier_1"
    )
    assert iterations(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert iterations(tmp_path / "earlier_1") == [4, 5]


def test_nothing_of_a_run_with_other_inputs_is_lost(tmp_path: Path) -> None:
    start(tmp_path, 0, 3, lr=1.0)
    (tmp_path / "profile_rank_00000.json").write_text("{}")
    words = start(tmp_path, 0, 2, lr=2.0)
    assert words is not None and "(--lr): 3 records, manifest, picture and profiles moved to " in words
    assert iterations(tmp_path) == [1, 2]
    assert iterations(tmp_path / "earlier_1") == [1, 2, 3]
    assert (tmp_path / "earlier_1" / "curves.png").read_text() == "{'lr': 1.0} to 3"
    assert json.loads((tmp_path / "earlier_1" / "manifest.json").read_text()) == manifest(lr=1.0)
    assert (tmp_path / "earlier_1" / "profile_rank_00000.json").exists()
    words = start(tmp_path, 2, 4, lr=3.0)
    assert words is not None and words.endswith(
        f"(--lr): 2 records, manifest and picture moved to {tmp_path}/earlier_2"
    )
    assert iterations(tmp_path) == [3, 4]


def test_records_of_the_run_that_is_gone_on_with_stay_whatever_has_changed(tmp_path: Path) -> None:
    first = manifest(lr=1.0)
    second = branched(first, 4, 2.0)
    start(tmp_path, 0, 4, first)
    words = start(tmp_path, 4, 8, second)
    assert words is not None and words.endswith(f"(--lr): manifest and picture moved to {tmp_path}/earlier_1")
    (tmp_path / "curves.png").unlink()
    words = start(tmp_path, 4, 6, branched(first, 4, 3.0))
    assert words is not None and f": 4 records after iteration 4 and manifest moved to {tmp_path}/earlier_2" in words
    assert iterations(tmp_path) == [1, 2, 3, 4, 5, 6]
    start(tmp_path, 2, 3, first)
    assert iterations(tmp_path) == [1, 2, 3]
    # Of the second run this one has no record after iteration 3: what is there belongs to the first.
    start(tmp_path, 8, 9, second)
    assert iterations(tmp_path) == [9]


def test_evaluations_of_other_seeds_do_not_mix(tmp_path: Path) -> None:
    for number, seed in enumerate((1, 2, 2, 3)):
        words = prepare_run_folder(
            tmp_path, branched(manifest(lr=1.0), 4, 1.0, seed=seed, skip=True), start_iteration=4
        )
        assert (words is not None) == (number in (1, 3))
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 4, "kind": "valid"}\n')
        assert iterations(tmp_path) == [[4], [4], [4, 4], [4]][number]


@pytest.mark.parametrize("text", ["{", "[1]", "\x80", '{"trajectory": 1}'])
def test_files_that_cannot_be_read_are_put_aside(tmp_path: Path, text: str) -> None:
    start(tmp_path, 0, 1, lr=1.0)
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1") + b"\n")
    words = start(tmp_path, 1, 2, lr=1.0)
    assert words is not None and "its manifest cannot be read" in words
    assert iterations(tmp_path) == [2]
    assert (tmp_path / "earlier_1" / "manifest.json").read_bytes() == text.encode("latin-1")


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'"):
        MetricsFile(tmp_path).on_evaluation("valid", 1, 2, {"lm loss": 3.0})
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'"):
        TraceWriter().open(tmp_path / "metrics.jsonl", {})
    (tmp_path / "curves.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/curves\.png'"):
        draw_curves({}, tmp_path / "curves.png", "nothing")
