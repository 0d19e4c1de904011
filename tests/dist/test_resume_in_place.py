"""Two ranks that go on in the folders they have written to: every iteration once, every launch in the manifest."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

from megatron.core.process_groups.collectives import gather_objects
from megatron.training.loop import fingerprints
from megatron.training.loop.fingerprints import Fingerprints, run_manifest
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, rank_file
from tests.support.legs import finished, run_legs
from tests.support.ranks import run_ranks
from tests.support.training import build_here

FIRST, LAST, TAKEN_UP = 4, 6, 2


def _iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_a_resumed_run_writes_on_in_its_own_folders(tmp_path: Path) -> None:
    """The second launch takes up an older checkpoint, so two iterations are done again."""
    words = (
        f"--train-iters {LAST} --save {tmp_path}/checkpoints --save-interval 2 --log-interval 1 "
        f"--run-dir {tmp_path} --tensorboard-dir {tmp_path}/tensorboard --fingerprint-dir {tmp_path}/fingerprint"
    )
    finished(2, f"{words} --exit-interval {FIRST}")
    fingerprint = tmp_path / "fingerprint"
    before = (fingerprint / FINGERPRINT_FILE).read_text()
    manifest = json.loads((fingerprint / "manifest.json").read_text())
    finished(2, f"{words} --load {tmp_path}/checkpoints --ckpt-step {TAKEN_UP}")

    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for kind, expected in {"train": [*range(1, LAST + 1)], "valid": [3, LAST]}.items():
        assert [record["iteration"] for record in metrics if record["kind"] == kind] == expected
    for name in (FINGERPRINT_FILE, rank_file(0), rank_file(1)):
        assert _iterations(fingerprint / name) == [*range(1, LAST + 1)]
    assert (fingerprint / FINGERPRINT_FILE).read_text().startswith(before)
    after = json.loads((fingerprint / "manifest.json").read_text())
    assert after["trajectory"] == manifest["trajectory"]
    assert after["launches"][:1] == manifest["launches"]
    assert [launch["start_iteration"] for launch in after["launches"]] == [0, TAKEN_UP]


def test_other_numbers_in_the_folder_stop_every_rank(tmp_path: Path) -> None:
    """Control: a line of the first launch that the second does not find again."""
    words = f"--train-iters {LAST} --save {tmp_path}/checkpoints --save-interval 2 --fingerprint-dir {tmp_path}/prints"
    finished(2, f"{words} --exit-interval {FIRST}")
    path = tmp_path / "prints" / FINGERPRINT_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[FIRST - 1]["params"] = "0" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = run_legs(2, f"{words} --load {tmp_path}/checkpoints --ckpt-step {TAKEN_UP}")
    assert {rank.code for rank in ended} == {4}, ended
    assert ended[1].error.startswith("rank 0: iteration 4 of this run is not what"), ended
    path = tmp_path / "prints" / rank_file(1)
    path.write_text("not a line\n" + path.read_text())
    ended = run_legs(2, f"{words} --load {tmp_path}/checkpoints --ckpt-step {TAKEN_UP}")
    assert {rank.code for rank in ended} == {3}, ended
    assert str(path) in ended[0].error


def test_a_folder_that_a_run_is_writing_is_refused_on_every_rank_and_left_alone(tmp_path: Path) -> None:
    """The other run is this process; the second launch has another layout, so that it would move the ranks' files."""
    words = f"--train-iters {LAST} --fingerprint-dir {tmp_path}"
    finished(1, f"{words} --exit-interval {TAKEN_UP} --logical-data-parallel-size 2")
    with (tmp_path / FINGERPRINT_FILE).open("a") as unfinished:
        unfinished.write('{"iteration": 3')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    fcntl.lockf(running := (tmp_path / FINGERPRINT_FILE).open("r+"), fcntl.LOCK_EX)
    ended = run_legs(2, words)
    assert {rank.code for rank in ended} == {2}, ended
    assert f"--fingerprint-dir {tmp_path}, whose {FINGERPRINT_FILE} another process is writing" in ended[1].error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before
    running.close()


def _late_lines() -> None:
    """The line of a step waits for the next one, as on a GPU, where digests are on their way."""
    fingerprints._to_host = lambda values: (values, SimpleNamespace(synchronize=lambda: None))


def test_the_last_line_of_a_run_is_written_and_compared_by_all(tmp_path: Path) -> None:
    words = f"--train-iters 3 --fingerprint-dir {tmp_path}"
    assert {rank.code for rank in run_legs(2, words, _late_lines)} == {0}
    path = tmp_path / rank_file(1)
    assert _iterations(path) == _iterations(tmp_path / FINGERPRINT_FILE) == [1, 2, 3]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["params"] = "0" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = run_legs(2, words, _late_lines)
    assert {rank.code for rank in ended} == {4}, ended
    assert ended[0].error.startswith("rank 1: iteration 3 of this run is not what"), ended


def _left_by_one(folder: Path) -> list[object]:
    """What the ranks tell each other while the second one closes its files, as after an error of its own: in a first
    launch, and in one that does the same step again."""
    _late_lines()
    said = []
    for _ in range(2):
        run = build_here(f"--hybrid-layer-pattern M- --global-batch-size 2 --fingerprint-dir {folder}")
        lines, reader = Fingerprints(run, run_manifest(run, start_iteration=0)), run.reader(run.splits.train)
        lines.on_step(run.step.run(reader, 1, 0), reader)
        if run.groups.world.rank == 1:
            lines.close()
        said.append(gather_objects(run.groups.world, ("after rank", run.groups.world.rank)))
        lines.close()
    return said


def test_files_are_closed_by_one_rank_alone(tmp_path: Path) -> None:
    told = [("after rank", 0), ("after rank", 1)]
    assert run_ranks(2, _left_by_one, tmp_path) == [[told, told]] * 2
    for name in (FINGERPRINT_FILE, rank_file(0), rank_file(1)):
        assert _iterations(tmp_path / name) == [1]
