"""Signs of life from a save or load that takes long."""

from __future__ import annotations

import time

EVERY_S = 10.0


class SlowProgress:
    """Prints a line every ten seconds; nothing for what is done before that."""

    def __init__(self, what: str, total_bytes: int, *, shown: bool) -> None:
        self._what, self._total, self._shown = what, total_bytes, shown
        self._start = self._last = time.monotonic()

    def __call__(self, done_bytes: int) -> None:
        """Tell how many bytes this rank has behind it."""
        now = time.monotonic()
        if not self._shown or now - self._last < EVERY_S:
            return
        self._last = now
        rate = done_bytes / (now - self._start) / 1e9
        share = min(1.0, done_bytes / max(1, self._total))
        print(
            f"{self._what}: {done_bytes / 1e9:.1f} GB ({share:.0%}) of this rank's share, {rate:.2f} GB/s", flush=True
        )
