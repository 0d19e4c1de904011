"""Write text that every machine has: the sources and texts of Python's own library, one JSON object a line.

    python tools/python_text.py python.jsonl

Tests and installed packages are left out. Exit codes: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

_KINDS = {".py", ".txt"}
_LEFT_OUT = {"site-packages", "test", "tests"}


def library_texts(library: Path) -> Iterator[str]:
    """The text of every source and every .txt file of the library, in the order of their paths, so that the end of it,
    which is validated on, is like the rest; what is not UTF-8 in one is left out of it."""
    for path in sorted(path for path in library.rglob("*") if path.suffix in _KINDS):
        if not _LEFT_OUT & set(path.relative_to(library).parts):
            text = path.read_text("utf-8", errors="ignore")
            if text:
                yield text


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python_text.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--characters", type=int, metavar="N", help="stop after the file that reaches so many")
    arguments = parser.parse_args(argv)
    left = arguments.characters
    try:
        with arguments.output.open("w", encoding="utf-8") as out:
            for text in library_texts(Path(sysconfig.get_paths()["stdlib"])):
                out.write(json.dumps({"text": text}) + "\n")
                left = None if left is None else left - len(text)
                if left is not None and left <= 0:
                    break
    except OSError as error:
        print(f"error: {arguments.output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
