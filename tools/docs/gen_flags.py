"""Write docs/flags.md and tests/golden/flags.txt from the configuration classes.

    python tools/docs/gen_flags.py --write      after a flag was added or changed
    python tools/docs/gen_flags.py --check      exit 1 if either file is stale

The golden list has one line per flag: spellings, type, default, effect on a run, class. A flag that appears,
goes away or changes its default is therefore a line in a diff.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterable

from generated import cell, table, write_or_check

from megatron.core.config.fields import Flag, flags_of
from megatron.training.config.run import config_classes

INTRODUCTION = """\
Made by `tools/docs/gen_flags.py` from the configuration classes; do not edit.

Each flag states what changing it does to a run:

* `trajectory`: it changes the numbers; runs that differ here are not comparable;
* `layout`: it changes where work is done and, in deterministic mode, no number;
* `operational`: it changes what is written, shown or waited for.
"""


def type_name(hint: object) -> str:
    """A type as a reader of the command line sees it: ``Optional`` left out, choices in braces."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args if a is not type(None))
    if origin is typing.Literal:
        return "{" + ",".join(str(a) for a in args) + "}"
    if origin is tuple:
        return f"{type_name(args[0])}..."
    return getattr(hint, "__name__", str(hint))


def default_text(flag: Flag) -> str:
    """The default as Python would write it; ``-`` where nothing is given."""
    return "-" if flag.default is None else repr(flag.default)


def checked(flags: Iterable[Flag]) -> list[Flag]:
    """The flags in their order.

    Raises:
        ValueError: two fields claim the same spelling.
    """
    owners: dict[str, str] = {}
    kept = list(flags)
    for flag in kept:
        field = f"{flag.owner.__name__}.{flag.name}"
        for spelling in flag.spellings:
            if spelling in owners:
                raise ValueError(f"{spelling} belongs to {owners[spelling]} and to {field}")
            owners[spelling] = field
    return kept


def golden_list(flags: list[Flag]) -> str:
    """One line per flag, in alphabetical order."""
    lines = [
        f"{' '.join(f.spellings)} | {type_name(f.hint)} | {default_text(f)} | {f.effect} | {f.owner.__name__}"
        for f in flags
    ]
    return "\n".join(sorted(lines)) + "\n"


def page(classes: Iterable[type], flags: list[Flag]) -> str:
    """The Markdown page, one section per class."""
    lines = ["# Flags", "", INTRODUCTION]
    for cls in classes:
        rows = [
            (
                ", ".join(f"`{s}`" for s in flag.spellings),
                "" if flag.is_switch else cell(type_name(flag.hint)),
                ("on" if flag.default is not flag.negates else "off")
                if flag.is_switch
                else f"`{cell(default_text(flag))}`",
                flag.effect,
                cell(flag.help),
            )
            for flag in flags
            if flag.owner is cls
        ]
        first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
        lines += [f"## {cls.__name__}", "", first_line, ""]
        lines += [*table(("flag", "value", "default", "effect", "meaning"), rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Path and text of both files."""
    classes = list(config_classes().values())
    flags = checked(flag for cls in classes for flag in flags_of(cls))
    return {"docs/flags.md": page(classes, flags), "tests/golden/flags.txt": golden_list(flags)}


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
