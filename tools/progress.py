"""A progress bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows how much of ``total_bytes`` of input is done, on stderr.

    On a terminal it is a bar (where the package rich is installed); otherwise a line each ``log_interval`` documents.
    """

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self._total, self._interval = total_bytes, log_interval
        self._done, self._next_line, self._start = 0, log_interval, time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                "{task.description}",
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("tokenising", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int, documents: int) -> None:
        """``num_bytes`` more are done, ``documents`` in all."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=f"{documents} documents")
            return
        if documents >= self._next_line:
            self._next_line = documents + self._interval
            seconds = max(time.monotonic() - self._start, 1e-9)
            rate = f"{documents / seconds:.0f} documents/s, {self._done / seconds / 1e6:.2f} MB/s"
            print(f"processed {documents} documents ({rate})", file=sys.stderr)
