"""Names, marker, moving into place and retention; every moment a save may be killed at."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing import folder
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.folder import (
    MARKER_FILE,
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


def save(root: Path, iteration: int, content: str = "x") -> Path:
    """A checkpoint of one file, the way a real one is committed."""
    (start_part(root, iteration) / "data").write_text(content)
    return commit(root, iteration, b"{}")


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


STEPS = ("write_synced", "sync_folder", "rename", "replace", "_remove")


@pytest.mark.parametrize("again", [False, True], ids=["next", "same"])
@pytest.mark.parametrize("moment", range(9))
def test_killed_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, again: bool
) -> None:
    """The ``moment``-th step of a save never happens: the checkpoint before it or the new one loads, the marker is
    right, and the next save works."""
    save(tmp_path, 4, "before")
    target, count = 4 if again else 8, 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("write_synced", "sync_folder", "_remove"):
            patch.setattr(folder, name, dying(getattr(folder, name)))
        for name in ("rename", "replace"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        try:
            save(tmp_path, target, "after")
        except Killed:
            assert loaded(tmp_path) in ("before", "after")
        else:
            assert loaded(tmp_path) == "after"
    save(tmp_path, target, "again")
    assert loaded(tmp_path) == "again"
    assert complete_iterations(tmp_path) == sorted({4, target})


def test_moments_cover_the_whole_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    save(tmp_path, 4)
    for name in ("write_synced", "sync_folder", "_remove"):
        monkeypatch.setattr(folder, name, counting(name, getattr(folder, name)))
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, counting(name, getattr(Path, name)))
    save(tmp_path, 4)
    assert set(calls) == set(STEPS)
    assert len(calls) - calls[::-1].index("replace") <= 10


def test_retention_keeps_multiples_links_and_newer_ones(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8, 10):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000003").symlink_to(iteration_folder(tmp_path, 4))
    part_folder(tmp_path, 5).mkdir()
    removed = remove_superseded(tmp_path, 8, 4)
    assert [path.name for path in removed] == ["iter_0000002", "iter_0000005.part", "iter_0000006"]
    assert complete_iterations(tmp_path) == [3, 4, 8, 10]
    assert remove_superseded(tmp_path, 8, None) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        require_writable(tmp_path / "file" / "checkpoints")
    require_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
