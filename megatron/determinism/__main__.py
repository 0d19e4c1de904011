"""``megatron-determinism``: did two runs do the same, bit by bit?

compare A B                  two fingerprint folders
verify [--runs N] -- LAUNCH  run a command several times, also stopped and resumed, and compare
checkpoint verify | diff     checkpoint folders: every digest, the logical content of two of them
trace-compare A B            two trace folders, event by event
bisect -- LAUNCH             run a command in pairs until the operation that differs is found
validate DIR -- PATCHED      run the pair of a bisection again, and a patched command in its place
replay -- LAUNCH             run iterations again from a checkpoint, traced, also on fewer ranks
tax -- LAUNCH                what deterministic mode costs against the fastest the machine has
kernels list | check         the ops, their variants and what each promises
kernels record               take over the digests of changed kernels and their tests
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.determinism.compare import compare
from megatron.determinism.trace_commands import COMMANDS, TAKE_LAUNCH, add_trace_commands, run_trace_command
from megatron.determinism.verify import default_folder, output_folder, verify

EXIT_CODES = {
    "compare": "0 identical on all common iterations, 1 different, 2 not comparable, 3 a file is missing or damaged",
    "verify": "0 all legs are identical, 1 different, 2 not comparable, 3 a leg failed",
    "trace-compare": "0 no difference, 1 different, 2 not comparable, 3 a file is missing or damaged",
    "bisect": "0 the runs agree, 1 they differ: operation, module, iteration and ranks are named, 2 not comparable, "
    "3 a leg failed",
    "validate": "0 the patched runs agree where the original pair differs, 1 they differ too, 2 the original pair "
    "agrees, which proves nothing, 3 a leg failed",
    "replay": "0 the replay is faithful, 1 it is not, 2 it cannot be made, 3 a file is missing or damaged, or a leg "
    "failed",
    "tax": "0 measured, 1 the interval's upper end is over --max-tax, or it is wider, 2 refused, 3 a leg failed",
    "checkpoint": "verify: 0 every digest is right, 1 damaged files and tensors are named, 3 not a checkpoint; "
    "diff: 0 the same content, 1 it differs, 2 different models, 3 not a checkpoint",
    "kernels": "0 complete, 1 faults are named",
}
"""What each command's exit codes mean; 2 is also wrong usage."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; the words behind ``--`` are not part of it."""
    parser = argparse.ArgumentParser(
        prog="megatron-determinism",
        description="Compare runs bit by bit.",
        epilog="Exit code 2 is also wrong usage; each command's --help says what its codes mean.",
        allow_abbrev=False,
    )
    names = "{compare,verify,trace-compare,bisect,validate,replay,tax,checkpoint,kernels}"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    pair = commands.add_parser("compare", allow_abbrev=False, help="compare two fingerprint folders")
    pair.add_argument("a", type=Path, help="fingerprint folder")
    pair.add_argument("b", type=Path, help="fingerprint folder")
    pair.add_argument("--force", action="store_true", help="compare although fixed inputs differ")
    pair.add_argument("--json", action="store_true", help="print one JSON object")
    legs = commands.add_parser(
        "verify",
        allow_abbrev=False,
        help="run a command several times in fresh processes and compare",
        usage="megatron-determinism verify [--runs N] [--resume-at N[,M..]] [--dir DIR] [--json] -- LAUNCH ...",
    )
    legs.add_argument("--runs", type=int, default=2, help="number of legs (default: 2)")
    legs.add_argument("--dir", type=output_folder, help="folder for the legs (default: runs/verify_TIME)")
    legs.add_argument("--json", action="store_true", help="print one JSON object")
    legs.add_argument(
        "--resume-at",
        type=iterations,
        default=(),
        metavar="N[,M..]",
        help="one more leg, stopped after these iterations and gone on with from its checkpoints",
    )
    add_trace_commands(commands)
    _add_tax(commands)
    kernels = commands.add_parser("kernels", allow_abbrev=False, help="list, check or record ops and kernels")
    kernels.add_argument("action", choices=("list", "check", "record"))
    kernels.add_argument("--no-test-change", metavar="REASON", help="record: why kernels changed without their tests")
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    checkpoint = commands.add_parser("checkpoint", allow_abbrev=False, help="check or compare checkpoint folders")
    checkpoint.add_argument("action", choices=("verify", "diff"))
    checkpoint.add_argument("folders", type=Path, nargs="+", help="iter_0000004, or a folder of such folders")
    checkpoint.add_argument("--json", action="store_true", help="print one JSON object")
    for name, command in commands.choices.items():
        command.epilog = f"Exit codes: {EXIT_CODES[name]}."
    return parser


def _add_tax(commands: Any) -> None:
    words = "[--pairs N] [--at-once N] [--limit-s S] [--max-tax X] [--ablate] [--warm-up N] [--dir DIR] [--json]"
    tax = commands.add_parser(
        "tax",
        allow_abbrev=False,
        help="measure what deterministic mode costs against the fastest the machine has",
        usage=f"megatron-determinism tax {words} -- LAUNCH ...",
    )
    tax.add_argument("--pairs", type=int, default=6, help="pairs of legs (default: 6, the least for an exact interval)")
    tax.add_argument(
        "--max-tax",
        type=share,
        metavar="X",
        help="largest tax accepted, as a share (0.01) or in per cent (1%%); the interval's upper end counts",
    )
    tax.add_argument("--ablate", action="store_true", help="also measure each choice by itself, in legs of its own")
    tax.add_argument(
        "--warm-up", type=int, metavar="N", help="iterations of a leg to leave out (default: a third, 1 to 10)"
    )
    tax.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="pairs that run side by side, each on an equal part of this machine's GPUs (default: 1, on all of them)",
    )
    tax.add_argument(
        "--limit-s", type=float, metavar="S", help="begin no further pairs that would not be over after so many seconds"
    )
    tax.add_argument("--dir", type=output_folder, help="folder for the legs and the report (default: runs/tax_TIME)")
    tax.add_argument("--json", action="store_true", help="print one JSON object")


def share(text: str) -> float:
    """A share from ``0.01`` or ``1%``.

    Raises:
        argparse.ArgumentTypeError: it is no such thing, or below 0.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a share such as 0.01, or 1%, of at least 0")
    return value


def iterations(text: str) -> tuple[int, ...]:
    """Ascending iterations from ``2,5``.

    Raises:
        argparse.ArgumentTypeError: they are no such thing.
    """
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text}: iterations separated by commas")
    found = tuple(int(word) for word in words)
    if found[0] < 1 or list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text}: ascending iterations from 1 on")
    return found


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; wrong usage ends the process with 2."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    own, launch = words[:split], words[split + 1 :]
    parser = build_parser()
    options = parser.parse_args(own)
    if options.command not in ("verify", "tax", *TAKE_LAUNCH) and split < len(words):
        parser.error(f"{options.command} takes no command after --")
    if options.command in COMMANDS:
        return run_trace_command(options, launch, parser)
    if options.command == "compare":
        return compare(options.a, options.b, force=options.force).print(sys.stdout, as_json=options.json)
    if options.command in ("kernels", "checkpoint"):
        if options.command == "checkpoint" and len(options.folders) != (2 if options.action == "diff" else 1):
            parser.error(
                f"checkpoint {options.action} takes {'two folders' if options.action == 'diff' else 'one folder'}"
            )
        # A process of its own: both need torch, which takes seconds to load.
        module = f"megatron.determinism.{options.command}"
        return subprocess.run([sys.executable, "-m", module, *own[1:]], check=False).returncode
    if not launch:
        parser.error(f"{options.command} needs the command to run, after --")
    if options.command == "tax":
        return _run_tax(options, launch, parser)
    if options.runs < 2:
        parser.error(f"--runs {options.runs}: at least 2, to compare one with another")
    folder = options.dir if options.dir is not None else default_folder(datetime.datetime.now())
    return verify(launch, folder, runs=options.runs, resume_at=options.resume_at).print(
        sys.stdout, as_json=options.json
    )


def _run_tax(options: argparse.Namespace, launch: Sequence[str], parser: argparse.ArgumentParser) -> int:
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    if options.warm_up is not None and options.warm_up < 0:
        parser.error(f"--warm-up {options.warm_up}: at least 0")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("tax draws a chart: pip install matplotlib")
    from megatron.determinism.tax import Request, default_folder, tax
    from megatron.determinism.tax_legs import gpus_here, split_gpus

    sets: list[str] = []
    if options.at_once != 1:
        gpus = gpus_here()
        if not 1 <= options.at_once <= len(gpus):
            parser.error(
                f"--at-once {options.at_once}: 1 to the number of GPUs, {len(gpus)} here; "
                "pairs that share processors would measure each other"
            )
        sets = split_gpus(gpus, options.at_once)
    folder = options.dir if options.dir is not None else default_folder(datetime.datetime.now())
    request = Request(
        pairs=options.pairs,
        max_tax=options.max_tax,
        ablate=options.ablate,
        warm_up=options.warm_up,
        gpu_sets=tuple(sets),
        limit_s=options.limit_s,
    )
    return tax(launch, folder, request).print(sys.stdout, as_json=options.json)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
