"""Words for what is wrong with a command line: the nearest names of a misspelt flag, the shape of a value."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence

from megatron.core.config.errors import Problem
from megatron.core.config.fields import Flag
from megatron.core.config.numbers import REAL_NUMBER, WHOLE_NUMBER

_MAX_NAMES = 3
_MIN_LIKENESS = 0.7


def nearest_names(spelling: str, known: Sequence[str]) -> list[str]:
    """Up to three of the known flags that look like ``spelling``, the likeliest first.

    A flag that ``spelling`` abbreviates or spells with underscores counts as likely whatever its length.
    """
    dashed = spelling.replace("_", "-")
    begins = [name for name in known if len(dashed) > 4 and name.startswith(dashed)]
    close = difflib.get_close_matches(dashed, known, n=_MAX_NAMES, cutoff=_MIN_LIKENESS)
    return list(dict.fromkeys([*begins, *close]))[:_MAX_NAMES]


def unknown_flag(spelling: str, known: Sequence[str]) -> tuple[Problem, list[str]]:
    """The problem with a flag nobody knows, and the names it suggests."""
    names = nearest_names(spelling, known)
    change = f"did you mean {' or '.join(names)}?" if names else "--help lists every flag"
    return Problem(spelling, "a flag that exists, spelt out in full", change), names


def value_shape(flag: Flag) -> str:
    """What a value of the flag looks like, as a phrase: "some text", "one of a, b"."""
    if typing.get_origin(flag.inner) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(flag.inner))
    shapes = {int: WHOLE_NUMBER, float: REAL_NUMBER, str: "some text"}
    return shapes[flag.inner]


def missing_value(spelling: str, shape: str) -> Problem:
    """A flag stands there without the value it takes."""
    return Problem(
        f"{spelling} without a value", shape, f"{spelling} VALUE; a value that starts with -- as {spelling}=VALUE"
    )


def surplus_values(spelling: str, values: Sequence[str], takes: str) -> Problem:
    """Values stand behind a flag that takes none, or no more."""
    given = f"{_quoted(values)} after {spelling}"
    change = f"remove {_it(values)}, or quote a value with spaces"
    if re.match("-[a-zA-Z]", values[0]):
        change = f"-{values[0]} if that flag is meant; flags begin with two dashes"
    return Problem(given, f"{takes} for {spelling}", change)


def stray_values(values: Sequence[str]) -> Problem:
    """Words at the start of the command line belong to no flag."""
    change = f"name the flag, or remove {_it(values)}"
    return Problem(_quoted(values), "a flag (--name) before every value", change)


def _quoted(values: Sequence[str]) -> str:
    return " ".join(repr(value) for value in values)


def _it(values: Sequence[str]) -> str:
    return "it" if len(values) == 1 else "them"
