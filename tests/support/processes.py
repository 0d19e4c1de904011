"""Other processes: their number, and whether they run."""

from __future__ import annotations

import time
from pathlib import Path


def number_in(path: Path) -> int:
    """The number that a process writes of itself into a file, once it is there."""
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.05)
    return int(path.read_text())


def runs(process: int) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends(process: int) -> bool:
    """Whether it ends within a minute."""
    end = time.monotonic() + 60
    while runs(process) and time.monotonic() < end:
        time.sleep(0.05)
    return not runs(process)
