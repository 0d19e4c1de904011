"""Text of the repository: ASCII, no paths of somebody's machine, and every file it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, Source, files_with, parse

TEXT = (".py", ".sh", ".md", ".toml", ".yaml", ".txt", ".json", "Makefile", ".importlinter", ".ci/run", "LICENSE")

# A folder that exists on one machine only, such as a home folder.
_FOREIGN_PATH = re.compile(r"(?<![\w.$}/:>-])/(home|root|work|Users|mnt|scratch)(/|\b)")
_PAGE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.md)\b")
# A file of the repository named in prose; a pattern or a placeholder has other letters in it and is left alone.
_FILE = re.compile(r"`((?:megatron|tests|tools|docs|examples)/[\w./-]+\.(?:py|sh|md|txt|json))`")


def not_ascii(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield f"{source.path}:{number}: not ASCII: {ascii(line.strip())}"


def foreign_paths(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if _FOREIGN_PATH.search(line):
            yield f"{source.path}:{number}: a path that exists on one machine only: {line.strip()}"


def missing_files(source: Source) -> Iterator[str]:
    folder = (ROOT / source.path).parent
    for number, line in enumerate(source.text.splitlines(), 1):
        for name in {*_PAGE.findall(line), *_FILE.findall(line)}:
            if not any((base / name).exists() for base in (ROOT, folder, ROOT / "docs")):
                yield f"{source.path}:{number}: names {name}, which does not exist"


def ours(*suffixes: str) -> list[Source]:
    """Files of the repository except this one, whose examples break the rules."""
    return [source for source in files_with(*suffixes) if source.path != "tests/architecture/test_text.py"]


CHECKS = {
    "ascii": (not_ascii, TEXT),
    "foreign-paths": (foreign_paths, TEXT),
    "missing-files": (missing_files, (".py", ".md", ".sh")),
}


@pytest.mark.parametrize("name", CHECKS)
def test_text_is_clean(name: str) -> None:
    check, suffixes = CHECKS[name]
    findings = [finding for source in ours(*suffixes) for finding in check(source)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("ascii", "x = '\u00e9'\n"),
        ("foreign-paths", "DATA = '/home/me/data'\n"),
        ("missing-files", "# see NOTES.md\n"),
        ("missing-files", "# see `megatron/core/nowhere.py`\n"),
    ],
)
def test_planted_text_is_seen(name: str, planted: str) -> None:
    check, _ = CHECKS[name]
    assert list(check(parse("megatron/core/planted.py", planted)))


@pytest.mark.parametrize("line", ["see docs/glossary.md", "x = ratio/work", "see `tests/architecture/rule.py`"])
def test_harmless_text_is_left_alone(line: str) -> None:
    source = parse("docs/planted.md", line + "\n")
    assert not [f for check, _ in CHECKS.values() for f in check(source)]
