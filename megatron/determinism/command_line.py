"""The command line of ``megatron-determinism``: commands, flags, what exit codes mean. Loads no torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from megatron.core.config.numbers import shortened, whole_number
from megatron.determinism.trace_commands import add_trace_commands
from megatron.determinism.verify import output_folder

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
    "checkpoint verify": "0 every digest is right, 1 damaged files and tensors are named, 3 not a checkpoint",
    "checkpoint diff": "0 the same content, 1 it differs, 2 different models, 3 not a checkpoint",
    "kernels check": "0 the manifest is complete, 1 faults are named, 2 it cannot be checked here",
    "kernels record": "0 all are taken over, 1 those refused are named",
}
"""What each command's exit codes mean; 2 is also wrong usage."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; the words behind ``--`` are not part of it. What it parses has the command's own ``parser``."""
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
    nested = {"kernels": _add_kernels(commands), "checkpoint": _add_checkpoint(commands)}
    parsers = {**commands.choices}
    for command in parsers.values():
        command.set_defaults(parser=command)
    for group, actions in nested.items():
        parsers |= {f"{group} {name}": action for name, action in actions.items()}
    for name, words in EXIT_CODES.items():
        parsers[name].epilog = f"Exit codes: {words}."
    return parser


def _add_kernels(commands: Any) -> dict[str, argparse.ArgumentParser]:
    kernels = commands.add_parser("kernels", allow_abbrev=False, help="list, check or record ops and kernels")
    actions = kernels.add_subparsers(dest="action", required=True, metavar="{list,check,record}")
    for name, words in {
        "list": "every variant of every op, what it promises and why",
        "check": "whether every kernel belongs to a tested variant, and none has changed without its tests",
        "record": "take over the digests of changed kernels and their tests",
    }.items():
        action = actions.add_parser(name, allow_abbrev=False, help=words)
        action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "record":
            action.add_argument("--no-test-change", metavar="REASON", help="why kernels changed without their tests")
    return actions.choices


def _add_checkpoint(commands: Any) -> dict[str, argparse.ArgumentParser]:
    checkpoint = commands.add_parser("checkpoint", allow_abbrev=False, help="check or compare checkpoint folders")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="{verify,diff}")
    meant = "iter_0000004, or a folder of such folders, whose newest is meant"
    check = actions.add_parser("verify", allow_abbrev=False, help="whether every file and tensor is as it was saved")
    check.add_argument("folder", type=Path, help=meant)
    diff = actions.add_parser("diff", allow_abbrev=False, help="whether two hold the same state, whatever the layouts")
    diff.add_argument("a", type=Path, help=meant)
    diff.add_argument("b", type=Path, help=meant)
    for action in (check, diff):
        action.add_argument("--json", action="store_true", help="print one JSON object")
    return actions.choices


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
    found = tuple(whole_number(word) or 0 for word in text.split(","))
    if found[0] < 1 or list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{shortened(text)}: ascending iterations from 1 on, separated by commas")
    return found
