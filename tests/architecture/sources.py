"""The files of the repository as the gates see them: path, text and, for Python, the parsed module."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders of tools and of runs, never of the project.
_NOT_OURS = frozenset({".git", ".venv", ".gpu", ".whl", "__pycache__"})
_NOT_OURS_AT_ROOT = frozenset({"build", "dist", "runs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file. ``path`` is relative to the repository, with ``/``; ``tree`` is empty if it is not Python."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The file's name without folders and without ``.py``."""
        return self.path.rpartition("/")[2].removesuffix(".py")

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parse(path: str, text: str) -> Source:
    """A source from text; a Python file that does not parse raises ``SyntaxError`` naming it."""
    tree = ast.parse(text, filename=path) if path.endswith(".py") else ast.Module(body=[], type_ignores=[])
    return Source(path=path, text=text, tree=tree)


@functools.cache
def files_with(*suffixes: str) -> tuple[Source, ...]:
    """Every file of the repository whose name ends in one of ``suffixes``, in path order."""
    return tuple(_source(path) for path in sorted(_walk(ROOT)) if path.name.endswith(suffixes))


@functools.cache
def _source(path: Path) -> Source:
    """Read and parsed once, whatever lists it stands in."""
    return parse(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            skipped = _NOT_OURS | _NOT_OURS_AT_ROOT if folder == ROOT else _NOT_OURS
            ours = path.name not in skipped and not path.name.endswith(("_cache", ".egg-info"))
            if ours and not path.is_symlink():
                yield from _walk(path)
        else:
            yield path
