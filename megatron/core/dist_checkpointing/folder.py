"""The folder that holds checkpoints: names, the marker of the newest one, writing aside and moving into place.

    ROOT/latest_checkpointed_iteration.txt         iteration of the newest complete checkpoint, moved last
    ROOT/latest_checkpointed_iteration.txt.part    what it will say next
    ROOT/iter_0000004/                             a complete checkpoint
    ROOT/iter_0000004.part/                        one that is being written, or what a killed save left
    ROOT/iter_0000004.old/                         the one before, while a save of the same iteration takes its place

A folder gets its final name by one rename, when everything in it is on the disk. Torch is not needed here.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import platform
import re
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.regular_file import kind_of, read_regular

MARKER_FILE = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_WRITER_FILE = "writer"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return root / f"iter_{iteration:07d}"


def part_folder(root: Path, iteration: int) -> Path:
    """Where it is written before it is complete."""
    return root / f"iter_{iteration:07d}.part"


def _old_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}.old"


def _next_marker(root: Path) -> Path:
    return root / (MARKER_FILE + ".part")


def newest_iteration(root: Path) -> int | None:
    """What the marker says; ``None`` where there is none, which means no checkpoint. A first save that was killed with
    its checkpoint in place and the marker yet to move counts as complete.

    Raises:
        DamagedInputError: the marker holds no iteration, or cannot be read.
    """
    marked = _read_marker(root / MARKER_FILE)
    return _first_in_place(root) if marked is None else marked


def _first_in_place(root: Path) -> int | None:
    try:
        first = _read_marker(_next_marker(root))
    except DamagedInputError:
        # Killed while it was written, before anything was moved into place.
        return None
    return None if first is None or _complete(root, first) is None else first


def _read_marker(path: Path) -> int | None:
    try:
        text = read_regular(path).decode("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedInputError(f"{path} cannot be read: {error}") from error
    if not re.fullmatch(r"\d{1,18}", text):
        raise DamagedInputError(f"{path} holds {text[:40]!r}, not an iteration")
    return int(text)


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint in the folder, ascending."""
    return [iteration for iteration in _iterations(root) if _complete(root, iteration) is not None]


def _iterations(root: Path) -> list[int]:
    """Iterations that folders are named for, complete or not, ascending."""
    return sorted({int(m[1]) for path in root.glob("iter_*") if (m := _NAME.match(path.name))})


def _complete(root: Path, iteration: int) -> Path | None:
    """The complete checkpoint of an iteration. The one that a killed save of the same iteration moved aside counts,
    as long as nothing has taken its place."""
    final = iteration_folder(root, iteration)
    path = final if os.path.lexists(final) else _old_folder(root, iteration)
    return path if _has_facts(path) else None


def _has_facts(folder: Path) -> bool:
    return (folder / FACTS_FILE).is_file()


def _holds(folder: Path, facts: bytes) -> bool:
    """Whether this is the folder with these facts."""
    try:
        return read_regular(folder / FACTS_FILE) == facts
    except OSError:
        return False


def find_checkpoint(root: Path, iteration: int | None = None) -> Path | None:
    """The checkpoint to load: the one of ``iteration``, else the newest one. ``None`` where there is none at all.

    Raises:
        DamagedInputError: the wanted one is missing or incomplete, or may not be read. An older one is never taken in
            its place.
    """
    try:
        return _find(root, iteration)
    except OSError as error:
        raise DamagedInputError(f"{root} cannot be read: {error}") from error


def _find(root: Path, iteration: int | None) -> Path | None:
    wanted = newest_iteration(root) if iteration is None else iteration
    if wanted is None:
        return None
    found = _complete(root, wanted)
    if found is not None:
        return found
    folder, others = iteration_folder(root, wanted), complete_iterations(root)
    state = f"is not complete ({FACTS_FILE} is {kind_of(folder / FACTS_FILE)})" if folder.exists() else "is not there"
    named = "--ckpt-step names it" if iteration is not None else f"{root / MARKER_FILE} names it"
    more = f"; --ckpt-step takes one of {', '.join(map(str, others))}" if others else ""
    raise DamagedInputError(f"{folder} {state}, and {named}{more}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the disk name this file, also those of calls on an open file, which know no name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk, where its file system can do that. Errors of the disk name the
    folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, raw: bytes) -> None:
    """Write a whole file and bring it to the disk. Errors of the disk name the file; a FIFO is one of them."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    try:
        write_all(handle, raw, path)
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, raw: bytes | memoryview, path: Path) -> None:
    """Write every byte.

    Raises:
        OSError: the disk is full, a limit on the size of files is reached, ...; names the file.
    """
    view = memoryview(raw).cast("B")
    with naming(path):
        while view:
            view = view[os.write(handle, view) :]


def require_writable(root: Path) -> None:
    """Make the folder, and write and remove a file in it.

    Raises:
        OSError: it cannot be made or written; names the place.
    """
    root.mkdir(parents=True, exist_ok=True)
    probe = root / ".writable"
    write_synced(probe, b"")
    probe.unlink(missing_ok=True)


class FolderInUseError(OSError):
    """Another process saves into the same folder; says which, as far as that is known."""


@dataclass(frozen=True, slots=True)
class PartFolder:
    """The folder that one save writes into. While it does, a file there says which process it is."""

    root: Path
    iteration: int
    writer: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return part_folder(self.root, self.iteration)

    def taken(self) -> FolderInUseError | None:
        """The error to raise where another process took it for what a killed save left, and has removed it or writes
        into it; ``None`` where none has. Only for a folder that is not complete yet."""
        return None if _writer_in(self.path) == self.writer else self.lost()

    def lost(self) -> FolderInUseError:
        """The error to raise where another process has it."""
        others = sorted({_writer_in(path) for path in self.root.glob("iter_*.part")} - {None, self.writer})
        who = "; ".join(others) or "it is over by now"
        return FolderInUseError(
            f"{self.path} was taken away by another process that saves into {self.root} ({who}): a --save folder "
            "belongs to one job"
        )

    def require_mine(self) -> None:
        """Make sure that no other process has taken it.

        Raises:
            FolderInUseError: see ``taken``.
        """
        error = self.taken()
        if error is not None:
            raise error


def require_free(root: Path, iteration: int) -> None:
    """There is no complete checkpoint of this iteration.

    Raises:
        FolderInUseError: there is one.
    """
    found = _complete(root, iteration)
    if found is not None:
        raise FolderInUseError(
            f"{found} was saved by another process since this one began: a --save folder belongs to one job"
        )


def _writer_in(path: Path) -> str | None:
    try:
        return read_regular(path / _WRITER_FILE).decode("utf-8", "replace")
    except OSError:
        return None


def start_part(root: Path, iteration: int) -> PartFolder:
    """An empty folder to write a checkpoint into. What killed saves left is put right or removed first: it takes the
    space that the new one needs."""
    root.mkdir(parents=True, exist_ok=True)
    final, old = iteration_folder(root, iteration), _old_folder(root, iteration)
    if not (root / MARKER_FILE).exists() and _first_in_place(root) is not None:
        _next_marker(root).replace(root / MARKER_FILE)
    if old.exists() and not final.exists():
        old.rename(final)
    _remove(old)
    now = datetime.datetime.now().astimezone().isoformat(" ", "microseconds")
    part = PartFolder(root, iteration, f"process {os.getpid()} on {platform.node()}, since {now}")
    for left in root.glob("iter_*.part"):
        _take_away(left)
    try:
        part.path.mkdir()
    except FileExistsError:
        part.require_mine()
    with naming(part.path / _WRITER_FILE):
        (part.path / _WRITER_FILE).write_text(part.writer, "utf-8")
    sync_folder(root)
    return part


def _take_away(left: Path) -> None:
    """Remove what a killed save left. It is renamed first: a save that is alive after all has moved it into place by
    then, or finds that it is gone."""
    own = left.with_name(f"{left.name.split('.')[0]}.{os.getpid()}_{time.time_ns()}.part")
    with contextlib.suppress(FileNotFoundError):
        left.rename(own)
        _remove(own)


def _remove(folder: Path) -> None:
    """Remove a folder, or a file with its name, if it is there; of a symbolic link only the link."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        # Without its facts it is no checkpoint any more, even where the deletion is cut short.
        (folder / FACTS_FILE).unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)


def commit(part: PartFolder, facts: bytes) -> Path:
    """Complete the part folder with its ``metadata.json``, move it into place, then move the marker.

    A previous checkpoint of the same iteration stays loadable until the new one has its name; ``remove_superseded``
    deletes it.

    Raises:
        OSError: of the disk, naming the place.
        FolderInUseError: see ``PartFolder.taken``.
    """
    root, iteration = part.root, part.iteration
    final, old = iteration_folder(root, iteration), _old_folder(root, iteration)
    part.require_mine()
    write_synced(part.path / FACTS_FILE, facts)
    part.require_mine()
    (part.path / _WRITER_FILE).unlink()
    sync_folder(part.path)
    write_synced(_next_marker(root), str(iteration).encode())
    if not _holds(part.path, facts):
        raise part.lost()
    if os.path.lexists(final):
        final.rename(old)
    part.path.rename(final)
    if not _holds(final, facts):
        # Somebody took it away since it was looked at, and began one of his own there.
        final.rename(part.path)
        if os.path.lexists(old):
            old.rename(final)
        raise part.lost()
    sync_folder(root)
    _next_marker(root).replace(root / MARKER_FILE)
    sync_folder(root)
    return final


def remove_superseded(root: Path, newest: int, interval: int | None, own: Collection[int] | None = None) -> list[str]:
    """Delete checkpoints of iterations before ``newest`` that ``interval`` does not divide, and ones aside whose
    iteration has a complete one in its place; never a symbolic link, and with ``own`` none of other iterations. Returns
    what could not be deleted, with the reason: the next call tries again."""
    words = []
    for iteration in (each for each in _iterations(root) if own is None or each in own):
        superseded = bool(interval and iteration < newest and iteration % interval)
        words.append(_remove_where_superseded(root, iteration, superseded=superseded))
    return [each for each in words if each is not None]


def _remove_where_superseded(root: Path, iteration: int, *, superseded: bool) -> str | None:
    path, final = _old_folder(root, iteration), iteration_folder(root, iteration)
    try:
        if os.path.lexists(path) and (_has_facts(final) or (superseded and not path.is_symlink())):
            _remove(path)
        # As long as one aside is complete it would come back for what has its place.
        if superseded and not final.is_symlink() and not _has_facts(path):
            path = final
            _remove(path)
    except OSError as error:
        return f"{path} could not be deleted ({error})"
    return None
