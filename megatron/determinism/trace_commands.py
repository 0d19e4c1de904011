"""``trace-compare`` and ``bisect`` on the command line."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.determinism.bisect import bisect
from megatron.determinism.trace_compare import trace_compare

COMMANDS = ("trace-compare", "bisect")


def add_trace_commands(commands: Any) -> None:
    """Add both to the subcommands of a parser."""
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
    search.add_argument("--dir", type=Path, help="folder for the legs and the reproducer (default: runs/bisect_TIME)")
    search.add_argument("--against", metavar="LAUNCH2", help="second command, in one word (default: the same again)")
    search.add_argument("--json", action="store_true", help="print one JSON object")


def run_trace_command(options: argparse.Namespace, launch: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run one of them and return its exit code."""
    if options.command == "trace-compare":
        outcome = trace_compare(options.a, options.b, force=options.force, report=options.html)
        return outcome.print(sys.stdout, as_json=options.json)
    if not launch:
        parser.error("bisect needs the command to run, after --")
    folder = options.dir or Path("runs") / f"bisect_{datetime.datetime.now():%Y%m%d_%H%M%S}"
    against = None if options.against is None else shlex.split(options.against)
    return bisect(launch, folder, against=against).print(sys.stdout, as_json=options.json)
