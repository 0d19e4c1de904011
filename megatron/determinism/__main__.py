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
import ctypes
import datetime
import importlib.util
import math
import signal
import subprocess
import sys
from collections.abc import Sequence

from megatron.determinism.command_line import build_parser
from megatron.determinism.compare import compare
from megatron.determinism.report import Exit
from megatron.determinism.trace_commands import COMMANDS, TAKE_LAUNCH, run_trace_command
from megatron.determinism.verify import default_folder, verify
from megatron.training.setup.closed_pipe import outlasting_readers

_SET_SIGNAL_OF_PARENTS_END = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""


@outlasting_readers()
def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; wrong usage ends the process with 2."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    own, launch = words[:split], words[split + 1 :]
    options = build_parser().parse_args(own)
    parser: argparse.ArgumentParser = options.parser
    if options.command not in ("verify", "tax", *TAKE_LAUNCH) and split < len(words):
        parser.error(f"{options.command} takes no command after --")
    if options.command in COMMANDS:
        return run_trace_command(options, launch, parser)
    if options.command == "compare":
        return compare(options.a, options.b, force=options.force).print(sys.stdout, as_json=options.json)
    if options.command in ("kernels", "checkpoint"):
        # A process of its own: both need torch, which takes seconds to load.
        module = f"megatron.determinism.{options.command}"
        command = [sys.executable, "-m", module, *own[1:]]
        return ended_by(subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode, options.command)
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
    if options.limit_s is not None and not 0 <= options.limit_s < math.inf:
        parser.error(f"--limit-s {options.limit_s}: seconds, at least 0")
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


def end_with_parent() -> None:
    """In a process that is being started: it ends with the one that starts it, also where that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL)


def ended_by(code: int, command: str) -> int:
    """The exit code of a process of ours; that of damage, and a line, where a signal ended it."""
    if code >= 0:
        return code
    print(f"error: {command} was ended by signal {-code}, so nothing is known", file=sys.stderr)
    return int(Exit.DAMAGED)


def main() -> None:
    """Entry point of the console script."""
    # As Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
