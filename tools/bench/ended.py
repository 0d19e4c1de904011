"""The end of launches that are not waited for."""

from __future__ import annotations

import os
import signal
import subprocess

GRACE_S = 8.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launch that has a session of its own: ask its launcher, then do it. Nothing where it has ended."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
