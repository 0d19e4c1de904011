"""Signs of life from a save or load that takes long."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

EVERY_S = 10.0


class SlowProgress:
    """Prints a line every ten seconds; nothing for what is done before that. Several threads may tell it.

    Args:
        what: what goes on.
        total_bytes: how much there is to do.
        of: what that is all of, where it is not everything.
        out: where to print, or ``None``.
    """

    def __init__(self, what: str, total_bytes: int, *, of: str = "", out: TextIO | None) -> None:
        self._what, self._total, self._of, self._out = what, total_bytes, of and f" of {of}", out
        self._done, self._lock = 0, threading.Lock()
        self._start = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._out is None or now - self._last < EVERY_S:
                return
            self._last = now
            rate = self._done / (now - self._start) / 1e9
            share = min(1.0, self._done / max(1, self._total))
            # One write a line: others print meanwhile.
            self._out.write(f"{self._what}: {self._done / 1e9:.1f} GB ({share:.0%}){self._of}, {rate:.2f} GB/s\n")
            self._out.flush()


def progress_of_rank(what: str, total_bytes: int, *, shown: bool) -> SlowProgress:
    """That of one rank's share of a save or load, which all do at once: one of them shows it."""
    return SlowProgress(what, total_bytes, of="this rank's share", out=sys.stdout if shown else None)
