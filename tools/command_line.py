"""What the tools share on their command lines: flags made from configuration fields, errors as exit codes."""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.config.fields import flags_of
from megatron.core.datasets.indexed_dataset import bin_path, idx_path
from megatron.training.config.folder_rules import unusable
from megatron.training.setup.closed_pipe import outlasting_readers

Config = TypeVar("Config")


def add_flags(parser: argparse.ArgumentParser, cls: type, only: Sequence[str] | None = None) -> None:
    """Add the flags of a configuration dataclass, or of the fields ``only``, with the field's help."""
    for flag in flags_of(cls):
        if only is not None and flag.name not in only:
            continue
        options: dict[str, Any] = {"dest": flag.name, "default": flag.default, "help": flag.help.replace("%", "%%")}
        if flag.is_switch:
            options["action"] = "store_false" if flag.negates else "store_true"
        else:
            choices = typing.get_args(flag.inner) if typing.get_origin(flag.inner) is typing.Literal else None
            options["type"] = str if choices else flag.inner
            options["metavar"] = None if choices else flag.inner.__name__.upper()
            options["choices"] = choices
            options["nargs"] = "+" if flag.repeated else None
        parser.add_argument(*flag.spellings, **options)


def config_from(cls: type[Config], arguments: argparse.Namespace) -> Config:
    """The dataclass, from arguments parsed with ``add_flags``; fields without a flag there keep their defaults."""
    owner: type = cls
    given = {flag.name: getattr(arguments, flag.name) for flag in flags_of(owner) if hasattr(arguments, flag.name)}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def wrote(prefix: str, *, replaced: bool) -> str:
    """The line that says where a data set is now, and whether another one was there."""
    return f"wrote {bin_path(prefix)} and {idx_path(prefix)}" + " in place of those that were there" * replaced


def run_tool(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a tool; a refused configuration is exit code 2, damaged input 3, a file that cannot be read or written 1,
    each with its message on stderr."""
    with outlasting_readers() as out:
        try:
            code = main(argv)
            out.flush()
            out.require_written()
        except (ConfigError, DamagedInputError) as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return code


def output_problems(prefix: str) -> list[Problem]:
    """Why a data set cannot be written under a prefix, as far as that shows before."""
    folder = Path(prefix).parent
    if not folder.is_dir():
        return [Problem(f"--output-prefix {prefix}", f"a folder {folder}", "--output-prefix")]
    reason = unusable(str(folder), write=True)
    if reason is None:
        return []
    return [Problem(f"--output-prefix {prefix}, {reason}", "a folder that can be written", "--output-prefix")]
