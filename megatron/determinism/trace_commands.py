"""``trace-compare``, ``bisect``, ``validate`` and ``replay`` on the command line."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.numbers import shortened, whole_number
from megatron.core.trace.format import LEVELS
from megatron.determinism.bisect import bisect
from megatron.determinism.replay import replay
from megatron.determinism.trace_compare import trace_compare
from megatron.determinism.validate import validate
from megatron.determinism.verify import output_folder

COMMANDS = ("trace-compare", "bisect", "validate", "replay")
TAKE_LAUNCH = COMMANDS[1:]


def add_trace_commands(commands: Any) -> None:
    """Add them to the subcommands of a parser."""
    traces = commands.add_parser("trace-compare", allow_abbrev=False, help="compare two trace folders event by event")
    traces.add_argument("a", type=Path, help="trace folder")
    traces.add_argument("b", type=Path, help="trace folder")
    traces.add_argument("--force", action="store_true", help="compare although fixed inputs differ")
    traces.add_argument("--html", type=Path, help="file of the report (default: trace_compare.html in B)")
    traces.add_argument("--json", action="store_true", help="print one JSON object")
    search = commands.add_parser(
        "bisect",
        allow_abbrev=False,
        help="run a command in pairs, traced closer each time, until the operation that differs is found",
        usage="megatron-determinism bisect [--dir DIR] [--against 'LAUNCH2'] [--json] -- LAUNCH ...",
    )
    search.add_argument(
        "--dir", type=output_folder, help="folder for the legs and the reproducer (default: runs/bisect_TIME)"
    )
    search.add_argument(
        "--against", type=command, metavar="LAUNCH2", help="second command, in one word (default: the same again)"
    )
    search.add_argument("--json", action="store_true", help="print one JSON object")
    fix = commands.add_parser(
        "validate",
        allow_abbrev=False,
        help="run the pair of a bisection again, and a patched command in its place",
        usage="megatron-determinism validate DIR [--against 'PATCHED2'] [--json] -- PATCHED LAUNCH ...",
    )
    fix.add_argument("folder", type=Path, help="folder of the bisection")
    fix.add_argument(
        "--against",
        type=command,
        metavar="PATCHED2",
        help="command in the place of B (default: the patched one again)",
    )
    fix.add_argument("--json", action="store_true", help="print one JSON object")
    again = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="run iterations again from a checkpoint, traced, also on fewer ranks",
        usage="megatron-determinism replay --iterations A:B --original DIR [--trace-level LEVEL] [--dir DIR] [--json] "
        "-- LAUNCH ...",
    )
    again.add_argument("--iterations", type=window, required=True, metavar="A:B", help="iterations to trace")
    again.add_argument("--original", type=Path, required=True, help="fingerprint folder of the run to replay")
    again.add_argument("--trace-level", choices=LEVELS, default="op", help="how closely to trace (default: op)")
    again.add_argument("--dir", type=output_folder, help="folder for the replay (default: runs/replay_TIME)")
    again.add_argument("--json", action="store_true", help="print one JSON object")


def window(text: str) -> tuple[int, int]:
    """First and last iteration from ``7:9`` or ``7``.

    Raises:
        argparse.ArgumentTypeError: they are no such thing.
    """
    first, colon, last = text.partition(":")
    begin, end = whole_number(first) or 0, whole_number(last if colon else first) or 0
    if not 1 <= begin <= end:
        raise argparse.ArgumentTypeError(f"{shortened(text)}: A:B with 1 <= A <= B, or one iteration")
    return begin, end


def command(text: str) -> list[str]:
    """The words of a command that is given in one.

    Raises:
        argparse.ArgumentTypeError: it has none, or a quotation without an end.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: a command as a shell takes it ({error})") from error
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r}: a command")
    return words


def run_trace_command(options: argparse.Namespace, launch: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run one of them and return its exit code."""
    if options.command == "trace-compare":
        outcome = trace_compare(options.a, options.b, force=options.force, report=options.html)
        return outcome.print(sys.stdout, as_json=options.json)
    if not launch:
        parser.error(f"{options.command} needs the command to run, after --")
    if options.command == "replay":
        folder = options.dir or _new_folder("replay")
        outcome = replay(launch, folder, options.original, options.iterations, options.trace_level)
        return outcome.print(sys.stdout, as_json=options.json)
    if options.command == "validate":
        return validate(options.folder, launch, options.against).print(sys.stdout, as_json=options.json)
    return bisect(launch, options.dir or _new_folder("bisect"), against=options.against).print(
        sys.stdout, as_json=options.json
    )


def _new_folder(command: str) -> Path:
    return Path("runs") / f"{command}_{datetime.datetime.now():%Y%m%d_%H%M%S}"
