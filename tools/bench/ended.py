"""The end of what a bench starts: launchers, and through them their ranks, get SIGTERM when SIGTERM or Ctrl-C ends the
bench. Of a launcher that is deaf to it and is killed, ranks in sessions of their own may live on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

GRACE_S = 8.0


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """In the block SIGTERM ends this process as Ctrl-C does: it unwinds."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_to_end(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``, in a session of its own that ends with the call, however the call ends."""
    with unwound(), subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            said, _ = process.communicate()
        finally:
            stop([process])
    return subprocess.CompletedProcess(command, process.returncode, said)


def stop(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """End launches that have sessions of their own: ask their launchers, then do it. Nothing where they have ended."""
    for process in (processes := list(processes)):
        process.terminate()
    for process in processes:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
