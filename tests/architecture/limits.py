"""Limits on size, names and text that hold for the whole repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.rule import EVERYWHERE, LIBRARY, Hit, Rule
from tests.architecture.sources import Source

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 80
MAX_POSITIONAL = 6

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: _Function) -> bool:
    """Whether a function is compiled for the GPU: it carries a decorator whose last name is ``jit``."""
    return any(re.search(r"(^|\.)jit\b", ast.unparse(d)) for d in function.decorator_list)


def _functions(tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[_Function, ast.ClassDef | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield node, owner
        yield from _functions(node, node if isinstance(node, ast.ClassDef) else None)


def _file_length(source: Source) -> Iterator[Hit]:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines, the limit is {MAX_FILE_LINES}: split by responsibility"


def _function_length(source: Source) -> Iterator[Hit]:
    for function, _ in _functions(source.tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
        if lines > limit:
            yield function.lineno, f"{function.name} has {lines} lines, the limit is {limit}"


def _called_by_position_only(function: _Function, owner: ast.ClassDef | None) -> bool:
    autograd = owner is not None and any(ast.unparse(base).endswith(("Function", "Node")) for base in owner.bases)
    return is_kernel(function) or (autograd and function.name in ("forward", "backward", "setup_context"))


def _positional(source: Source) -> Iterator[Hit]:
    for function, owner in _functions(source.tree):
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_POSITIONAL and not _called_by_position_only(function, owner):
            yield (
                function.lineno,
                f"{function.name} takes {count} parameters by position, the limit is {MAX_POSITIONAL}: "
                "put a * before those a caller should name",
            )


def _annotations(source: Source) -> Iterator[Hit]:
    for function, owner in _functions(source.tree):
        if _called_by_position_only(function, owner):
            continue
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        bare = [a.arg for a in every if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        if bare:
            yield function.lineno, f"{function.name}: no type for {', '.join(bare)}"
        if function.returns is None:
            yield function.lineno, f"{function.name}: no type for what it returns"


def _file_name(source: Source) -> Iterator[Hit]:
    if source.name in ("utils", "util", "common", "helpers", "helper", "misc"):
        yield 1, f"{source.name}.py says nothing: name the file after what it is responsible for"


def _text_pattern(pattern: str, wrong: str):
    compiled = re.compile(pattern)

    def check(source: Source) -> Iterator[Hit]:
        for number, line in enumerate(source.text.splitlines(), 1):
            if compiled.search(line):
                yield number, wrong

    return check


_PLANTS = {"tests/architecture/": "the breaches planted to test these rules are here"}

LIMITS = (
    Rule(
        name="file-length",
        check=_file_length,
        where=EVERYWHERE,
        planted="x = 1\n" * (MAX_FILE_LINES + 1),
    ),
    Rule(
        name="function-length",
        check=_function_length,
        where=EVERYWHERE,
        planted="def long():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
    ),
    Rule(
        name="kernel-length",
        check=_function_length,
        where=("megatron/core/ops/",),
        planted="@triton.jit\ndef long_kernel():\n" + "    x = 1\n" * MAX_KERNEL_LINES,
        planted_at="megatron/core/ops/planted/fast.py",
    ),
    Rule(
        name="positional-parameters",
        check=_positional,
        where=EVERYWHERE,
        planted="class A:\n    def f(self, a, b, c, d, e, f, g): ...\n",
    ),
    Rule(
        name="annotations",
        check=_annotations,
        planted="def f(a: int, b) -> int: ...\n",
    ),
    Rule(
        name="file-name",
        check=_file_name,
        where=EVERYWHERE,
        planted="x = 1\n",
        planted_at="megatron/core/transformer/utils.py",
    ),
    Rule(
        name="unfinished",
        check=_text_pattern(
            r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b|\bMagicMock\b|\bunittest\.mock\b",
            "unfinished or faked: do it, or leave the feature out and refuse it with a reason",
        ),
        where=EVERYWHERE,
        allowed=_PLANTS,
        planted="def f():\n    raise NotImplementedError\n",
    ),
    Rule(
        name="banner",
        check=_text_pattern(r"^\s*#\s*[-=#*~]{4,}", "a banner line: the file wants to be two"),
        where=EVERYWHERE,
        allowed=_PLANTS,
        planted="# -------------\nx = 1\n",
    ),
    Rule(
        name="skipped-tests",
        check=_text_pattern(
            r"pytest\.(mark\.)?(skip|xfail)\b",
            "a test that does not run proves nothing: mend or remove it",
        ),
        where=("tests/",),
        allowed={**_PLANTS, "tests/conftest.py": "skips GPU tests where there is no GPU"},
        planted="import pytest\n\n\n@pytest.mark.xfail\ndef test_x(): ...\n",
        planted_at="tests/unit/test_planted.py",
    ),
    Rule(
        name="private-import",
        check=lambda source: (
            (node.lineno, f"{alias.name} is private to {node.module}: make it public or do without it")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name.startswith("_") and not alias.name.endswith("__")
        ),
        where=LIBRARY,
        planted="from megatron.core.config.fields import _unwrap\n",
    ),
)
