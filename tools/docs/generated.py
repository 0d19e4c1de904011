"""Pages that are made from the code: written by ``--write``, compared with the code by ``--check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def cell(text: object) -> str:
    """Text as it may stand in a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def stale(pages: Mapping[str, str], root: Path) -> list[str]:
    """Paths under ``root`` whose text is not what ``pages`` says."""
    return [
        path for path, text in pages.items() if not (root / path).exists() or (root / path).read_text("utf-8") != text
    ]


def write_or_check(pages: Mapping[str, str], argv: list[str]) -> int:
    """Carry out the command line of a generator.

    ``pages`` maps a path in the repository to the text it should hold. Returns the exit code: 0 done or
    fresh, 1 for ``--check`` on a page that is stale or missing.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the pages: " + ", ".join(pages))
    action.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="folder in which the pages lie")
    options = parser.parse_args(argv)
    old = stale(pages, options.root)
    if options.check:
        for path in old:
            print(f"{path} does not match the code; run `python {sys.argv[0]} --write`", file=sys.stderr)
        return int(bool(old))
    for path in old:
        (options.root / path).parent.mkdir(parents=True, exist_ok=True)
        (options.root / path).write_text(pages[path], "utf-8")
        print(f"wrote {path}")
    return 0
