"""The argument dump and ``--help``: every setting with its value, every flag with its text."""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.fields import Flag, flags_of
from megatron.training.config.run import RunConfig, config_classes

_NAME_WIDTH = 48
_HELP_WIDTH = 100
HELP_FLAGS = ("--help", "-h")


def dumped_name(flag: Flag) -> str:
    """The name of a setting in the dump: Megatron's, which is the flag with underscores, or the field's where the
    flag switches it off."""
    if flag.negates:
        return flag.name
    return flag.spellings[0].removeprefix("--").replace("-", "_")


def argument_dump(config: RunConfig, further: Mapping[str, Any] | None = None) -> str:
    """All settings in Megatron's look: sorted without regard to case, names padded with dots, between two banners.

    ``further`` adds what is no setting, such as the world size. Tuples are shown as lists, as Megatron has them.
    """
    values: dict[str, Any] = dict(further or {})
    for group, cls in config_classes().items():
        for flag in flags_of(cls):
            value = getattr(getattr(config, group), flag.name)
            values[dumped_name(flag)] = list(value) if isinstance(value, tuple) else value
    lines = [f"  {name} {'.' * (_NAME_WIDTH - len(name))} {value}" for name, value in values.items()]
    first, last = "arguments", "end of arguments"
    rule = "-" * 24
    return "\n".join(
        [f"{rule} {first} {rule}", *sorted(lines, key=str.lower), f"{'-' * 20} {last} {'-' * 21}"],
    )


def wants_help(argv: Sequence[str]) -> bool:
    """True where the command line asks for help."""
    return any(word in HELP_FLAGS for word in argv)


def help_text(program: str) -> str:
    """Every flag by group, made from the fields; Megatron's flags without a field are not listed."""
    lines = [
        f"usage: {program} FLAGS",
        "",
        *textwrap.wrap(
            "Flags have Megatron's names and meaning and are spelt out in full; the last of repeated "
            "flags counts, and --no-x takes back a switch --x. Other flags of Megatron's are taken with a warning or "
            "refused with a reason.",
            _HELP_WIDTH,
        ),
    ]
    for cls in config_classes().values():
        heading = " ".join((inspect.getdoc(cls) or cls.__name__).split()).partition(". ")[0].rstrip(".")
        lines += ["", f"{heading}:"]
        for flag in flags_of(cls):
            lines += _described(flag)
    return "\n".join(lines)


def _described(flag: Flag) -> list[str]:
    value = "" if flag.is_switch else f" {_placeholder(flag)}"
    default = "" if flag.is_switch or flag.default is None else f" (default: {flag.default})"
    text = textwrap.wrap(flag.help + default, _HELP_WIDTH - 8, break_on_hyphens=False, break_long_words=False)
    return [f"  {', '.join(flag.spellings)}{value}", *(f"        {line}" for line in text)]


def _placeholder(flag: Flag) -> str:
    if typing.get_origin(flag.inner) is typing.Literal:
        word = "{" + ",".join(str(choice) for choice in typing.get_args(flag.inner)) + "}"
    else:
        word = {int: "N", float: "X", str: "TEXT"}[flag.inner]
    return f"{word} ..." if flag.repeated else word
