"""The folder that holds checkpoints: names, the marker of the newest one, writing aside and moving into place.

    ROOT/latest_checkpointed_iteration.txt    iteration of the newest complete checkpoint, moved last
    ROOT/iter_0000004/                        a complete checkpoint
    ROOT/iter_0000004.part/                   one that is being written, or what a killed save left
    ROOT/iter_0000004.old/                    the one before, while a save of the same iteration takes its place

A folder gets its final name by one rename, when everything in it is on the disk. Torch is not needed here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.facts import FACTS_FILE

MARKER_FILE = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return root / f"iter_{iteration:07d}"


def part_folder(root: Path, iteration: int) -> Path:
    """Where it is written before it is complete."""
    return root / f"iter_{iteration:07d}.part"


def _old_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}.old"


def newest_iteration(root: Path) -> int | None:
    """What the marker says; ``None`` where there is no marker, which means no checkpoint.

    Raises:
        DamagedInputError: the marker holds no iteration, or cannot be read.
    """
    path = root / MARKER_FILE
    try:
        text = path.read_text("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedInputError(f"{path} cannot be read: {error}") from error
    if not text.isdecimal():
        raise DamagedInputError(f"{path} holds {text!r}, not an iteration")
    return int(text)


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint in the folder, ascending."""
    found = {int(m[1]) for path in root.glob("iter_*") if (m := _NAME.match(path.name))}
    return sorted(n for n in found if _complete(root, n) is not None)


def _complete(root: Path, iteration: int) -> Path | None:
    """The complete checkpoint of an iteration. The one that a killed save of the same iteration moved aside counts,
    as long as nothing has taken its place."""
    for path in (iteration_folder(root, iteration), _old_folder(root, iteration)):
        if (path / FACTS_FILE).is_file():
            return path
    return None


def find_checkpoint(root: Path, iteration: int | None = None) -> Path | None:
    """The checkpoint to load: the one of ``iteration``, else the newest one. ``None`` where there is none at all.

    Raises:
        DamagedInputError: the wanted one is missing or incomplete. An older one is never taken in its place.
    """
    wanted = newest_iteration(root) if iteration is None else iteration
    if wanted is None:
        return None
    found = _complete(root, wanted)
    if found is not None:
        return found
    folder, others = iteration_folder(root, wanted), complete_iterations(root)
    state = f"is not complete ({FACTS_FILE} is missing)" if folder.exists() else "is not there"
    named = "--ckpt-step names it" if iteration is not None else f"{root / MARKER_FILE} names it"
    more = f"; --ckpt-step takes one of {', '.join(map(str, others))}" if others else ""
    raise DamagedInputError(f"{folder} {state}, and {named}{more}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the disk name this file, also those of calls that know a number only."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk. Errors of the disk name the folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, raw: bytes) -> None:
    """Write a whole file and bring it to the disk. Errors of the disk name the file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
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
    probe.unlink()


def start_part(root: Path, iteration: int) -> Path:
    """An empty folder to write a checkpoint into; what a killed save left is put right or removed."""
    root.mkdir(parents=True, exist_ok=True)
    final, old, part = iteration_folder(root, iteration), _old_folder(root, iteration), part_folder(root, iteration)
    if old.exists() and not final.exists():
        old.rename(final)
    _remove(old)
    _remove(part)
    part.mkdir()
    sync_folder(root)
    return part


def _remove(folder: Path) -> None:
    """Remove a folder if it is there; of a symbolic link only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def commit(root: Path, iteration: int, facts: bytes) -> Path:
    """Complete the part folder with its ``metadata.json``, move it into place, then move the marker.

    A previous checkpoint of the same iteration stays loadable until the new one has its name.
    """
    final, old, part = iteration_folder(root, iteration), _old_folder(root, iteration), part_folder(root, iteration)
    write_synced(part / FACTS_FILE, facts)
    sync_folder(part)
    if final.exists():
        final.rename(old)
    part.rename(final)
    sync_folder(root)
    unfinished = root / (MARKER_FILE + ".part")
    write_synced(unfinished, str(iteration).encode())
    unfinished.replace(root / MARKER_FILE)
    sync_folder(root)
    _remove(old)
    return final


def remove_superseded(root: Path, newest: int, interval: int | None) -> list[Path]:
    """Retention: delete older checkpoints whose iteration ``interval`` does not divide, and what killed saves left of
    older ones; never a symbolic link. Returns what was deleted."""
    removed = []
    for path in sorted(root.glob("iter_*")):
        match = _NAME.match(path.name)
        if match is None or int(match[1]) >= newest or path.is_symlink() or not path.is_dir():
            continue
        whole = path.name == match[0]
        if (whole and interval and int(match[1]) % interval) or path.suffix == ".part":
            # Without its facts it is no checkpoint any more, even where the deletion is cut short.
            (path / FACTS_FILE).unlink(missing_ok=True)
            shutil.rmtree(path)
            removed.append(path)
    return removed
