"""Every module of core that does something is named by a test."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.architecture.sources import Source, files_with, parse

# Statements a module may have before it needs a test that names it: imports, docstring, a type or two.
TRIVIAL_STATEMENTS = 4

# Modules that no test file names, and what tests them instead. A path ending in / stands for a folder.
TESTED_ELSEWHERE = {
    "megatron/core/config/": "field groups act through RunConfig: tests/unit/training/config and the golden flag list",
    "megatron/core/ops/": "by registration: tests/ops runs every variant of every op in the catalog",
}


def names_in(source: Source) -> set[str]:
    """Dotted names a test file refers to: what it imports, and strings that name a module."""
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("megatron."):
            names.add(node.value)
    return names


def untested(modules: Iterable[Source], tests: Iterable[Source]) -> list[str]:
    """Paths of modules that no test imports and after which no test file is named."""
    tests = list(tests)
    named = {name for test in tests for name in names_in(test)}
    twins = {test.name.removeprefix("test_") for test in tests if test.name.startswith("test_")}
    return [
        source.path
        for source in modules
        if len(source.tree.body) > TRIVIAL_STATEMENTS
        and not source.path.endswith("__init__.py")
        and not source.path.startswith(tuple(TESTED_ELSEWHERE))
        and source.module not in named
        and source.name not in twins
    ]


def under(prefix: str) -> list[Source]:
    """Python files whose path starts with ``prefix``."""
    return [source for source in files_with(".py") if source.path.startswith(prefix)]


def test_every_module_of_core_is_named_by_a_test() -> None:
    missing = untested(under("megatron/core/"), under("tests/"))
    assert not missing, "\nno test names these modules:\n" + "\n".join(missing)


def test_module_without_a_test_is_seen() -> None:
    module = parse("megatron/core/rng/planted.py", "import math\na = 1\nb = 2\nc = 3\nd = 4\n")
    other = parse("tests/unit/test_other.py", "from megatron.core.rng import counter\n")
    named = parse("tests/unit/test_other.py", "from megatron.core.rng.planted import a\n")
    twin = parse("tests/unit/core/rng/test_planted.py", "")
    assert untested([module], [other]) == [module.path]
    assert untested([module], [named]) == []
    assert untested([module], [twin]) == []
