"""Killed in the middle of a save, again and again: each restart finds the newest complete checkpoint and goes on.

Ranks write their shares as several files side by side, as they do with much to write.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing import folder, save, writer
from megatron.core.dist_checkpointing.folder import complete_iterations, iteration_folder, newest_iteration
from megatron.determinism.checkpoint import diff_checkpoints, verify_checkpoint
from megatron.determinism.compare import compare
from megatron.training.checkpoint import checkpointer
from tests.support.legs import finished, run_legs


@dataclass(frozen=True)
class Moment:
    """Before call ``nth`` of a function during the second save of a leg, on one rank or (-1) on every rank that gets
    there. ``complete``: whether the new checkpoint counts already; ``None`` where another rank may be faster."""

    name: str
    owner: Any
    function: str
    rank: int = 0
    nth: int = 1
    complete: bool | None = False


MOMENTS = (
    Moment("the save begins, all ranks", checkpointer, "save_checkpoint", rank=-1),
    Moment("the part folder is made", save, "start_part"),
    Moment("planning, rank 1", save.dcp, "save", rank=1),
    Moment("first entry, rank 0", writer.HashingFile, "write"),
    Moment("first entry, rank 1", writer.HashingFile, "write", rank=1),
    Moment("in the middle, rank 0", writer.HashingFile, "write", nth=60),
    Moment("in the middle, rank 1", writer.HashingFile, "write", rank=1, nth=90),
    Moment("in the middle, all ranks", writer.HashingFile, "write", rank=-1, nth=120),
    Moment("file complete, not synced, rank 0", writer.HashingFile, "finish"),
    Moment("file complete, not synced, rank 1", writer.HashingFile, "finish", rank=1),
    Moment("most files complete, rank 1", writer.HashingFile, "finish", rank=1, nth=4),
    Moment("DCP metadata", writer, "write_synced"),
    Moment("digests are gathered, rank 1", save.CheckpointGroup, "gather_on_first", rank=1, nth=2),
    Moment("everything but metadata.json", save, "commit"),
    Moment("metadata.json", folder, "write_synced"),
    Moment("metadata.json is on the disk", folder, "sync_folder", nth=2),
    Moment("moving into place", Path, "rename"),
    Moment("in place", folder, "sync_folder", nth=3),
    Moment("marker written aside", folder, "write_synced", nth=2),
    Moment("marker moves", Path, "replace"),
    Moment("marker has moved", folder, "sync_folder", nth=4, complete=True),
    Moment("retention", save, "remove_superseded", complete=True),
    Moment("all done, rank 1", save.CheckpointGroup, "failures", rank=1, nth=2, complete=None),
)

# While an iteration that is there already is saved again, into the same folder.
AGAIN = (
    Moment("the old one is moved aside", Path, "rename"),
    Moment("the new one moves into its place", Path, "rename", nth=2),
    Moment("marker moves to where it was", Path, "replace"),
    Moment("the old one is removed", folder, "_remove", nth=2),
)

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = pytest.mark.timeout(600)
SOME = MOMENTS[1::4]
FILE_BYTES = 1 << 14
WORDS = "--bf16 --use-distributed-optimizer --train-iters 60 --eval-iters 0 --save-interval 1"


def plant(name: str, save_number: int = 2) -> None:
    """In a rank's process: be killed at the moment of that name, in that save of the leg."""
    (moment,) = [moment for moment in (*MOMENTS, *AGAIN) if moment.name == name]
    rank = dist.get_rank()
    writer.FILE_BYTES = FILE_BYTES
    if moment.rank not in (-1, rank):
        return
    state, lock = {"saves": 0, "calls": 0}, threading.Lock()
    saving = checkpointer.save_checkpoint

    def counting_saves(*args: Any) -> None:
        state["saves"] += 1
        saving(*args)

    checkpointer.save_checkpoint = counting_saves
    original = getattr(moment.owner, moment.function)
    armed = save_number - (moment.function == "save_checkpoint")

    def dying(*args: Any, **kwargs: Any) -> Any:
        with lock:
            state["calls"] += state["saves"] >= armed
            if state["calls"] == moment.nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(moment.owner, moment.function, dying)


def run_killed(words: str, moment: Moment) -> None:
    """A leg that does not survive its second save."""
    with pytest.raises(AssertionError, match=r"died without a word|Connection|reset by peer|closed"):
        run_legs(2, words, functools.partial(plant, moment.name))


def kill_and_go_on(root: Path, moments: tuple[Moment, ...], *, asynchronous: Callable[[int], bool]) -> None:
    """One killed leg per moment, each going on from what the one before left; then one to the end, against a straight
    leg."""
    straight, killed = root / "straight", root / "killed"
    end = 2 + 2 * len(moments)
    flags = f"{WORDS} --exit-interval {end}"
    finished(2, f"{flags} --save {straight}/checkpoints --fingerprint-dir {straight}/fingerprint")
    words = f"{flags} --save {killed}/checkpoints --load {killed}/checkpoints --fingerprint-dir {killed}/fingerprint"
    before = 0
    for number, moment in enumerate(moments):
        run_killed(words + " --async-save" * asynchronous(number), moment)
        newest = newest_iteration(killed / "checkpoints")
        expected = {before + 1 + done for done in ((False, True) if moment.complete is None else (moment.complete,))}
        assert newest in expected, f"{moment.name}: the marker says {newest}, not {expected}"
        assert newest in complete_iterations(killed / "checkpoints"), moment.name
        assert verify_checkpoint(killed / "checkpoints").exit == 0, moment.name
        for rank in range(2):
            assert len([*iteration_folder(killed / "checkpoints", newest).glob(f"__{rank}_*")]) >= 4, moment.name
        before = newest
    out = finished(2, words)
    assert f"at iteration {before}" in out
    outcome = compare(straight / "fingerprint", killed / "fingerprint")
    assert outcome.exit == 0, outcome
    assert outcome.facts["common_iterations"] == end
    assert diff_checkpoints(straight / "checkpoints", killed / "checkpoints").exit == 0


def test_killed_saves_lose_nothing(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, SOME, asynchronous=lambda number: number % 2 == 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("saving", ["sync", "async"])
def test_every_moment(tmp_path: Path, saving: str) -> None:
    assert len(MOMENTS) >= 20
    kill_and_go_on(tmp_path, MOMENTS, asynchronous=lambda _: saving == "async")


@pytest.mark.slow
def test_killed_while_an_iteration_is_saved_again(tmp_path: Path) -> None:
    """Going on from an older checkpoint comes past the newest one once more: one of the two stays at any moment."""
    root = tmp_path / "checkpoints"
    words = f"{WORDS} --save {root} --fingerprint-dir {tmp_path}/fingerprint"
    finished(2, f"{words} --exit-interval 3")
    for moment in AGAIN:
        # Taking away what the one before left would be the first of the renames that are counted.
        for left in root.glob("iter_*.part"):
            shutil.rmtree(left)
        with pytest.raises(AssertionError, match=r"died without a word|Connection|reset by peer|closed"):
            run_legs(2, f"{words} --load {root} --ckpt-step 2", functools.partial(plant, moment.name, 1))
        assert newest_iteration(root) == 3, moment.name
        assert complete_iterations(root) == [1, 2, 3], moment.name
        assert verify_checkpoint(root).exit == 0, moment.name
        out = finished(2, f"{WORDS} --load {root} --exit-interval 4 --fingerprint-dir {tmp_path}/{moment.nth}")
        assert "at iteration 3" in out, moment.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moving into place", "in place", "marker moves"])
def test_killed_in_the_first_save_of_all(tmp_path: Path, name: str) -> None:
    """The command that was killed, given once more, begins from the seed or goes on, and ends well either way."""
    words = f"{WORDS} --exit-interval 3 --save {tmp_path}/c --load {tmp_path}/c --fingerprint-dir {tmp_path}/killed"
    with pytest.raises(AssertionError, match=r"died without a word|Connection|reset by peer|closed"):
        run_legs(2, words, functools.partial(plant, name, 1))
    out = finished(2, words)
    assert ("successfully loaded checkpoint" in out) == (name != "moving into place")
    finished(2, f"{WORDS} --exit-interval 3 --fingerprint-dir {tmp_path}/straight")
    assert compare(tmp_path / "straight", tmp_path / "killed").exit == 0
