"""Names, marker, moving into place and retention; every moment a save may be killed at."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing import folder
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.folder import (
    MARKER_FILE,
    FolderInUseError,
    commit,
    complete_iterations,
    find_checkpoint,
    iteration_folder,
    newest_iteration,
    part_folder,
    remove_superseded,
    require_writable,
    start_part,
)
from megatron.core.dist_checkpointing.stored import checkpoint_in
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.resume_rules import require_nothing_to_load


def put_in_place(root: Path, iteration: int, content: str) -> Path:
    part = start_part(root, iteration)
    (part.path / "data").write_text(content)
    return commit(part, b"{}")


def save(root: Path, iteration: int, content: str = "x") -> Path:
    """A checkpoint of one file, the way a real one is committed."""
    final = put_in_place(root, iteration, content)
    assert remove_superseded(root, iteration, None) == []
    return final


def loaded(root: Path) -> str | None:
    """What the newest checkpoint holds."""
    found = find_checkpoint(root)
    return None if found is None else (found / "data").read_text()


class Killed(BaseException):
    """Stands for the end of the process."""


def test_marker_is_a_bare_number_and_folders_have_seven_digits(tmp_path: Path) -> None:
    assert newest_iteration(tmp_path) is None
    assert find_checkpoint(tmp_path) is None
    assert save(tmp_path, 4) == tmp_path / "iter_0000004"
    assert (tmp_path / MARKER_FILE).read_bytes() == b"4"
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", MARKER_FILE]


def test_a_step_can_be_chosen_and_a_missing_one_names_the_others(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 8)
    assert find_checkpoint(tmp_path, 4) == iteration_folder(tmp_path, 4)
    with pytest.raises(DamagedInputError, match=r"iter_0000006 is not there.*--ckpt-step takes one of 4, 8"):
        find_checkpoint(tmp_path, 6)


def test_incomplete_newest_is_reported_and_not_skipped(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 8)
    (iteration_folder(tmp_path, 8) / FACTS_FILE).unlink()
    with pytest.raises(DamagedInputError, match=r"iter_0000008 is not complete.*takes one of 4"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "release", "4x", "-4", "\xff"])
def test_marker_that_holds_no_iteration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedInputError, match=MARKER_FILE):
        newest_iteration(tmp_path)


STEPS = {
    "write_synced": folder,
    "sync_folder": folder,
    "_remove": folder,
    "mkdir": Path,
    "rename": Path,
    "replace": Path,
    "unlink": Path,
    "rmtree": shutil,
}
"""What changes the disk in a save, and where it is looked up."""


def watch_steps(patch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call ``before`` with the name of every step before it is taken."""

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            before(name)
            return function(*args, **kwargs)

        return call

    for name, owner in STEPS.items():
        patch.setattr(owner, name, watched(name, getattr(owner, name)))


FIRST, NEXT, SAME = (), (4,), (4, 8)
"""Checkpoints there are before iteration 8 is saved."""


@pytest.mark.parametrize("there", [FIRST, NEXT, SAME], ids=["first", "next", "same"])
@pytest.mark.parametrize("moment", range(22))
def test_killed_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, there: tuple[int, ...]
) -> None:
    """The ``moment``-th step of a save never happens: the checkpoint before it or the new one loads, the marker is
    right, and the next save works and leaves nothing behind. Where there was none before, it is none or the new one."""
    for iteration in there:
        save(tmp_path, iteration, "before")
    calls: list[str] = []

    def die(name: str) -> None:
        calls.append(name)
        if len(calls) > moment:
            raise Killed

    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path), save_interval=4)
    with monkeypatch.context() as patch:
        watch_steps(patch, die)
        with contextlib.suppress(Killed):
            save(tmp_path, 8, "after")
    found = loaded(tmp_path)
    if len(calls) <= moment:
        assert found == "after"
        assert set(calls) >= {"write_synced", "sync_folder", "mkdir", "rename", "replace"}
    elif there:
        assert found in ("before", "after")
    elif found is None:
        (words,) = require_nothing_to_load(config)
        assert "training starts from the seed" in words
    else:
        assert found == "after"
    if found == "after":
        # What a run that goes on from there saves next is as safe.
        with monkeypatch.context() as patch:
            watch_steps(patch, lambda name: die(name) if name == "rename" else None)
            with contextlib.suppress(Killed):
                save(tmp_path, 12, "later")
        assert loaded(tmp_path) in ("after", "later")
    save(tmp_path, 8, "again")
    assert loaded(tmp_path) == "again"
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"iter_0000004", "iter_0000008", "iter_0000012", MARKER_FILE}
    assert {4, 8} & {*complete_iterations(tmp_path)} == {*there, 8}


@pytest.mark.parametrize("there", [FIRST, NEXT, SAME], ids=["first", "next", "same"])
def test_moments_cover_the_whole_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[int, ...]) -> None:
    for iteration in there:
        save(tmp_path, iteration)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        watch_steps(patch, calls.append)
        save(tmp_path, 8)
    assert len(calls) <= 21
    assert set(calls) >= {*STEPS} - ({"_remove", "rmtree", "unlink"} if there != SAME else set())


def test_marker_written_aside_by_halves_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / (MARKER_FILE + ".part")).write_bytes(b"")
    part_folder(tmp_path, 8).mkdir()
    assert newest_iteration(tmp_path) is None
    save(tmp_path, 4)
    assert loaded(tmp_path) == "x"


def test_what_killed_saves_left_gives_its_space_to_the_next_one(tmp_path: Path) -> None:
    """Before anything is written: on a full disk there is no room for both."""
    save(tmp_path, 4)
    for iteration in (6, 12):
        (part_folder(tmp_path, iteration)).mkdir()
        (part_folder(tmp_path, iteration) / "data").write_text("x" * 1000)
    start_part(tmp_path, 8)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000004", "iter_0000008.part"]


def test_retention_keeps_multiples_links_and_newer_ones(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8, 10):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000003").symlink_to(iteration_folder(tmp_path, 4))
    part_folder(tmp_path, 5).mkdir()
    assert remove_superseded(tmp_path, 8, None) == []
    assert complete_iterations(tmp_path) == [2, 3, 4, 6, 8, 10]
    assert remove_superseded(tmp_path, 8, 4) == []
    assert complete_iterations(tmp_path) == [3, 4, 8, 10]


@pytest.mark.parametrize("target", ["iter_0000002", "nowhere"])
def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_what_it_names_stays(tmp_path: Path, target: str) -> None:
    save(tmp_path, 2)
    iteration_folder(tmp_path, 4).symlink_to(tmp_path / target)
    save(tmp_path, 4, "new")
    assert loaded(tmp_path) == "new"
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000002", "iter_0000004"]


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    root = tmp_path / "a b [x]*\n\u00e4\U0001f600"
    save(root, 2)
    save(root, 4)
    assert complete_iterations(root) == [2, 4]
    assert remove_superseded(root, 4, 4) == []
    assert find_checkpoint(root) == iteration_folder(root, 4)
    assert complete_iterations(root) == [4]


def test_one_moved_aside_does_not_outlive_what_took_its_place(tmp_path: Path) -> None:
    """A save of an iteration that was there is killed before the old one goes; retention takes both, at last."""
    save(tmp_path, 3, "first")
    put_in_place(tmp_path, 3, "second")
    assert (tmp_path / "iter_0000003.old").is_dir()
    save(tmp_path, 8)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000003", "iter_0000008"]
    iteration_folder(tmp_path, 3).rename(tmp_path / "iter_0000003.old")
    assert complete_iterations(tmp_path) == [3, 8]
    assert remove_superseded(tmp_path, 8, 4) == []
    assert complete_iterations(tmp_path) == [8]


def replaced(root: Path) -> None:
    """Iteration 3 was saved twice, and the first of them is still aside."""
    put_in_place(root, 3, "first")
    put_in_place(root, 3, "second")
    put_in_place(root, 8, "newest")
    assert [path.name for path in sorted(root.glob("iter_*"))] == ["iter_0000003", "iter_0000003.old", "iter_0000008"]


def held(root: Path, iteration: int) -> str | None:
    """What the checkpoint of an iteration holds, where there is one."""
    try:
        return (find_checkpoint(root, iteration) / "data").read_text()
    except DamagedInputError:
        return None


def test_one_aside_that_cannot_be_deleted_keeps_what_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come back as the checkpoint of its iteration."""
    replaced(tmp_path)
    remove = folder._remove

    def refused(path: Path) -> None:
        if path.name == "iter_0000003.old":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_remove", refused)
        (words,) = remove_superseded(tmp_path, 8, 4)
    assert words.startswith(f"{tmp_path / 'iter_0000003.old'} could not be deleted ([Errno 13] Permission denied")
    assert held(tmp_path, 3) == "second"
    assert remove_superseded(tmp_path, 8, 4) == []
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000008"]


@pytest.mark.parametrize("moment", range(8))
def test_no_older_state_comes_back_whenever_a_deletion_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    replaced(tmp_path)
    calls: list[str] = []

    def die(name: str) -> None:
        calls.append(name)
        if len(calls) > moment:
            raise Killed

    with monkeypatch.context() as patch:
        watch_steps(patch, die)
        with contextlib.suppress(Killed):
            remove_superseded(tmp_path, 8, 4)
    # Both: remove, take the facts away, bring that to the disk, delete the rest.
    assert len(calls) == min(moment + 1, 8)
    assert held(tmp_path, 3) == ("second" if moment < 6 else None)
    assert loaded(tmp_path) == "newest"
    assert remove_superseded(tmp_path, 8, 4) == []
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000008"]


def test_half_of_a_deleted_checkpoint_is_not_taken_for_the_one_aside(tmp_path: Path) -> None:
    replaced(tmp_path)
    (tmp_path / "iter_0000003" / FACTS_FILE).unlink()
    with pytest.raises(DamagedInputError, match=r"iter_0000003 is not complete \(metadata.json is missing\)"):
        find_checkpoint(tmp_path, 3)


def test_what_cannot_be_deleted_is_named_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (1, 2, 3, 8):
        save(tmp_path, iteration)

    def busy(path: Path) -> None:
        if path.name == "iter_0000002":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmtree(path)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        (words,) = remove_superseded(tmp_path, 8, 4)
    assert words.startswith(f"{tmp_path / 'iter_0000002'} could not be deleted ([Errno 39] Directory not empty")
    assert complete_iterations(tmp_path) == [8]
    assert remove_superseded(tmp_path, 8, 4) == []
    assert not (tmp_path / "iter_0000002").exists()


def test_a_checkpoint_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 4)

    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(DamagedInputError, match=r"cannot be read: .*Permission denied.*iter_0000004"):
        find_checkpoint(tmp_path)
    with pytest.raises(DamagedInputError, match=r"cannot be read: .*Permission denied.*iter_0000004"):
        checkpoint_in(tmp_path / "iter_0000004")


def test_a_file_system_that_syncs_no_folders_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 4)
    assert loaded(tmp_path) == "x"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        require_writable(tmp_path / "file" / "checkpoints")
    require_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


TAKEN = "was taken away by another process that saves into "


@pytest.mark.parametrize("iteration", [4, 6])
@pytest.mark.parametrize("over", [True, False])
def test_of_two_saves_into_one_folder_one_ends_and_says_why(tmp_path: Path, iteration: int, over: bool) -> None:
    """The second one takes the first one's for what a killed save left, and is the one that is there afterwards."""
    save(tmp_path, 2)
    first = start_part(tmp_path, 4)
    second = start_part(tmp_path, iteration)
    (second.path / "data").write_text("second")
    if over:
        commit(second, b"{}")
    with pytest.raises(FolderInUseError, match=f"iter_0000004.part {TAKEN}{tmp_path}") as caught:
        commit(first, b"{}")
    assert ("it is over by now" if over else second.writer) in str(caught.value)
    assert held(tmp_path, 2) == "x"
    if not over:
        commit(second, b"{}")
    assert loaded(tmp_path) == held(tmp_path, iteration) == "second"
    assert sorted(path.name for path in iteration_folder(tmp_path, iteration).iterdir()) == ["data", FACTS_FILE]


@pytest.mark.parametrize("moment", ["sync_folder", "_holds"])
@pytest.mark.parametrize("before", [True, False])
def test_another_s_half_of_a_checkpoint_does_not_take_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, before: bool
) -> None:
    """It is begun between what the first one looks at last and its renaming; there may be a previous checkpoint."""
    if before:
        save(tmp_path, 4)
    first, others = start_part(tmp_path, 4), []
    function = getattr(folder, moment)

    def interrupted(path: Path, *args: bytes) -> bool | None:
        found = function(path, *args)
        if not others:
            others.append(None)
            others[0] = start_part(tmp_path, 4)
            (others[0].path / "data").write_text("second")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(folder, moment, interrupted)
        with pytest.raises(FolderInUseError, match=TAKEN):
            commit(first, b"{}")
    assert find_checkpoint(tmp_path) == (iteration_folder(tmp_path, 4) if before else None)
    assert not before or held(tmp_path, 4) == "x"
    commit(others[0], b"{}")
    assert loaded(tmp_path) == "second"


@pytest.mark.parametrize("step", ["rename", "_remove"])
def test_what_is_moved_into_place_meanwhile_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The first of two saves ends at the moment at which the second wants to remove what it has written."""
    part = start_part(tmp_path, 4)
    (part.path / "data").write_text("first")
    ended: list[Path | str] = []

    owner = {"rename": os, "_remove": folder}[step]
    function = getattr(owner, step)

    def ending(path: Path, *args: Path) -> None:
        if path.suffix == ".part" and not ended:
            ended.append(path)
            try:
                ended.append(commit(part, b"{}"))
            except FolderInUseError as error:
                ended.append(str(error))
        function(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, ending)
        second = start_part(tmp_path, 6)
    if step == "rename":
        assert loaded(tmp_path) == "first"
    else:
        assert TAKEN in str(ended[1])
    (second.path / "data").write_text("second")
    commit(second, b"{}")
    assert complete_iterations(tmp_path) == ([4, 6] if step == "rename" else [6])
    assert sorted(path.name for path in tmp_path.glob("*.part")) == []


def test_retention_deletes_none_that_another_process_saved(tmp_path: Path) -> None:
    for iteration in (2, 3, 8):
        save(tmp_path, iteration)
    assert remove_superseded(tmp_path, 8, 4, own={2, 8}) == []
    assert complete_iterations(tmp_path) == [3, 8]


def test_a_disk_without_room_for_the_first_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*iter_0000004.part/writer'"):
        start_part(tmp_path, 4)
