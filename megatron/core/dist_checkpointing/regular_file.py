"""Opening what lies in a checkpoint folder, if it is a file: a FIFO would be waited for, for ever. Torch is not needed
here."""

from __future__ import annotations

import io
import stat
from pathlib import Path

_OTHERS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class NoFileError(OSError):
    """Something is there that is no file; says what."""


def open_regular(path: Path) -> io.FileIO:
    """The file, open for reading without a buffer; of a symbolic link the one it names.

    Raises:
        OSError: it cannot be opened.
        NoFileError: it is a FIFO, a socket or a device, and is left alone.
    """
    other = _OTHERS.get(stat.S_IFMT(path.stat().st_mode))
    if other is not None:
        raise NoFileError(f"it is {other}, not a file")
    return path.open("rb", buffering=0)


def read_regular(path: Path) -> bytes:
    """All bytes of a file; raises as ``open_regular``."""
    with open_regular(path) as file:
        return file.readall()
