"""What the log of a run that failed says: the trainer's own words, without those of the launcher around it.

python -m megatron.determinism.leg_log LOG CODE     the exit code of the run's first rank to fail, then the reason
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_TAIL_LINES = 15
_LAUNCHER_LINE = re.compile(r"[WEI]\d{4} [\d:.]+ \d+ \S*torch/distributed/(elastic|run)")
_ROOT_CAUSE = re.compile(r"^Root Cause .*?^ *exitcode *: (-?\d+)", re.DOTALL | re.MULTILINE)
_ERROR = re.compile(r"error(?: on rank \d+)?: ")
"""How the trainer and the tools begin what they say to the user, see ``setup/command_line.py``; further lines of it are
indented."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run failed: the exit code of the rank that was first, what was said, and whether the trainer said it, so
    that the words are an explanation and not the end of the output."""

    code: int
    words: tuple[str, ...]
    explained: bool


def read_failure(log: Path, code: int) -> Failure:
    """What ``log`` says of a run whose process ended with ``code``.

    The words are the error messages of all ranks, each once, or the last lines of the output in front of the launcher's
    own where there is no such message. A launcher ends with 1 whatever its ranks end with; then the code is the rank's.
    """
    text = log.read_text("utf-8", errors="replace")
    root = _ROOT_CAUSE.search(text)
    lines = _without_launcher(text.splitlines())
    errors = _error_lines(lines)
    return Failure(int(root[1]) if root else code, tuple(errors or _last(lines)), bool(errors))


def _without_launcher(lines: list[str]) -> list[str]:
    """The lines before the launcher reports the end of its ranks."""
    ends = [n for n, line in enumerate(lines) if _LAUNCHER_LINE.match(line) and "(exitcode: " in line]
    return [line for line in lines[: ends[0] if ends else None] if not _LAUNCHER_LINE.match(line)]


def _last(lines: list[str]) -> list[str]:
    """The last lines, without what stands in front of a traceback that begins in them."""
    tail = lines[-_TAIL_LINES:]
    traces = [n for n, line in enumerate(tail) if line.startswith("Traceback ")]
    return tail[traces[0] if traces else 0 :]


def _error_lines(lines: list[str]) -> list[str]:
    found: dict[str, list[str]] = {}
    block: list[str] | None = None
    for line in lines:
        start = _ERROR.match(line)
        if start:
            words = line[start.end() :]
            block = [line]
            found.setdefault(words, block)
        elif block is not None and line.startswith("  "):
            block.append(line)
        else:
            block = None
    return [line for lines_of_one in found.values() for line in lines_of_one]


def main() -> None:
    """Print the exit code, then the words, a line each."""
    failure = read_failure(Path(sys.argv[1]), int(sys.argv[2]))
    print(failure.code, *failure.words, sep="\n")


if __name__ == "__main__":
    main()
