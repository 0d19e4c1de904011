"""Memory that is not there, whoever says so: torch on a GPU, torch on a CPU, NumPy."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

_PACKAGE = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_OF_CPU = "can't allocate memory"
"""What torch's allocator of the CPU says, in an error without a type of its own."""


def out_of_memory(error: BaseException) -> str | None:
    """What was asked for and where, in a line; ``None`` for another error. Does without torch."""
    of_gpu = type(error).__name__ == "OutOfMemoryError"
    if not (of_gpu or isinstance(error, MemoryError) or _OF_CPU in str(error)):
        return None
    said = str(error).partition("\n")[0] or "Python's allocator has none left"
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    where = f" ({ours[-1].filename.removeprefix(_PACKAGE)}:{ours[-1].lineno})" if ours else ""
    return f"out of memory{where}: {said}"
