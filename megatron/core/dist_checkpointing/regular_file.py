"""Opening what lies in a checkpoint folder, if it is a file: a FIFO would be waited for, for ever. Torch is not needed
here."""

from __future__ import annotations

import io
import stat
from pathlib import Path

_FILE, _NOTHING = "a file", "missing"
_KINDS = {
    stat.S_IFREG: _FILE,
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NoFileError(OSError):
    """Something is there that is no file; says what."""


def kind_of(path: Path) -> str:
    """What is there, as a word for a message; of a symbolic link what it names. "missing": nothing."""
    try:
        return _KINDS[stat.S_IFMT(path.stat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return _NOTHING


def open_regular(path: Path) -> io.FileIO:
    """The file, open for reading without a buffer; of a symbolic link the one it names.

    Raises:
        OSError: it cannot be opened.
        NoFileError: it is a directory, a FIFO, a socket or a device, and is left alone.
    """
    kind = kind_of(path)
    if kind not in (_FILE, _NOTHING):
        raise NoFileError(f"it is {kind}, not a file")
    return path.open("rb", buffering=0)


def read_regular(path: Path) -> bytes:
    """All bytes of a file; raises as ``open_regular``."""
    with open_regular(path) as file:
        return file.readall()
