"""Times the project's ops against those of outside packages, at the sizes of tools/bench/shapes.py.

    python -m tools.bench.outside
    python -m tools.bench.outside --op ssd_scan --budget 300 --json outside.json

Prints, per op and shape, medians of the forward and of forward and backward in bf16, the latter over the fastest of the
project's own, and whether 5 replays had the same bits. A package says once, when it is imported, in which mode it is,
so each mode has a process: first the project's own variants and the packages' deterministic modes, then the packages'
default modes. mamba-ssm's default mode comes last and at its first size only, because it times its launches for about
90 s there. A package that is missing, does not load or ends its process is a line of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron.core.ops.availability import installed
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.outside import load_problems
from megatron.core.ops.registry import Variant
from megatron.training.setup.determinism import enter_deterministic_mode
from megatron.training.setup.environment import read_environment
from megatron.training.setup.pinned_environment import PINS
from tools.bench.ended import unwound
from tools.bench.ops import median_ms, replays_agree, runs
from tools.bench.shapes import WORKLOADS
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
OPS = ("ssd_scan", "causal_conv1d", "attention", "grouped_gemm", "grouped_grad", "linear_grad")
PACKAGES = ("mamba_ssm", "causal_conv1d", "transformer_engine", "fused_weight_gradient_mlp_cuda")
"""Top-level modules; the last one is apex's."""
SLOW = "ssd_scan=mamba_ssm"
"""Timed at its first size only."""
DETERMINISTIC, DEFAULT = "deterministic", "default"
COLUMNS = ("op", "variant", "mode", "shape", "fwd ms", "fwd+bwd ms", "over ours", "replays")
WIDTHS = (14, 28, 14, 26, 9, 11, 10, 8)

Row = dict[str, str]


def variant_of(choice: str) -> Variant:
    """The variant ``op=variant``."""
    op, _, name = choice.partition("=")
    return {op.spec.name: op for op in ALL_OPS}[op].variant(name)


def legs(ops: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Processes in order: the mode of each, and its choices ``op=variant``."""
    by_name = {op.spec.name: op for op in ALL_OPS}
    strict: list[str] = []
    default: list[str] = []
    for op in ops:
        for v in by_name[op].variants:
            if v.outside is None and v.name not in ("deterministic", "reference") and "cuda" in v.guarantee:
                strict.append(f"{op}={v.name}")
            elif v.outside is not None and "cuda" in v.guarantee:
                (strict if v.outside.fits(strict=True) else default).append(f"{op}={v.name}")
    quick = [choice for choice in default if choice != SLOW]
    return [(DETERMINISTIC, strict), (DEFAULT, quick), (DEFAULT, [c for c in default if c == SLOW])]


def note(choice: str, mode: str, text: str) -> Row:
    """A row about something that was not timed."""
    op, _, name = choice.partition("=")
    return {"op": op, "variant": name, "mode": mode, "shape": text}


def measured(choice: str, mode: str) -> Iterator[Row]:
    """One row per workload."""
    op, _, name = choice.partition("=")
    variant = variant_of(choice)
    for work in WORKLOADS[op]()[: 1 if choice == SLOW else None]:
        forward, both = runs(variant, work)
        with torch.enable_grad():
            forward_ms = median_ms(forward)
            both_ms = None if both is None else median_ms(both)
            same = replays_agree(variant, work, both or forward)
        yield {
            "op": op,
            "variant": name,
            "mode": mode,
            "shape": work.label,
            "fwd ms": f"{forward_ms:.3f}",
            "fwd+bwd ms": "" if both_ms is None else f"{both_ms:.3f}",
            "replays": "same" if same else "differ",
        }
        gc.collect()
        torch.cuda.empty_cache()


def run_leg(mode: str, choices: Sequence[str], rows: Path) -> None:
    """Time ``choices`` in this process and write a line as each begins and one per row.

    Packages are loaded first: Transformer Engine wants to be there before anybody calls cuDNN.
    """
    if mode == DETERMINISTIC:
        enter_deterministic_mode()
        torch.utils.deterministic.fill_uninitialized_memory = False
    with rows.open("a", buffering=1) as out:
        good = []
        for choice in choices:
            outside = variant_of(choice).outside
            print(json.dumps({"begins": choice}), file=out)
            problems = load_problems(choice, outside) if outside is not None else []
            if problems:
                print(json.dumps(note(choice, mode, problems[0].given)), file=out)
            else:
                good.append(choice)
        for choice in good:
            print(json.dumps({"begins": choice}), file=out)
            for row in measured(choice, mode):
                print(json.dumps(row), file=out)


def timed_leg(mode: str, choices: Sequence[str], deadline: float) -> list[Row]:
    """Rows of a leg, in fresh processes; one that ends its process is noted, and the rest go on in the next."""
    unset = {pin.name for pin in PINS}
    environment = {name: value for name, value in read_environment().items() if name not in unset}
    rows: list[Row] = []
    left = list(choices)
    while left:
        seconds = deadline - time.monotonic()
        if seconds < 1:
            return rows + [note(choice, mode, "not run: the budget is spent") for choice in left]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.touch()
            command = [sys.executable, "-m", "tools.bench.outside", "--leg", mode, "--rows", str(path)]
            command += [word for choice in left for word in ("--choice", choice)]
            end = outcome(command, environment, seconds)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        rows += [line for line in lines if "begins" not in line]
        if not end:
            return rows
        begun = [line["begins"] for line in lines if "begins" in line] or left[:1]
        rows.append(note(begun[-1], mode, end))
        done = {f"{row['op']}={row['variant']}" for row in rows}
        left = [choice for choice in left if choice not in done]
    return rows


def outcome(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a leg's process; empty, or how it failed."""
    try:
        with unwound():
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
    except subprocess.TimeoutExpired:
        return f"stopped: more than the {seconds:.0f} s that were left"
    said = done.stderr.strip().splitlines() or ["no message"]
    return f"ended with {done.returncode}: {said[-1][:100]}" if done.returncode else ""


def milliseconds(row: Row) -> float | None:
    """Time of forward and backward, or of what there is; ``None`` for a row that was not timed."""
    text = row.get("fwd+bwd ms") or row.get("fwd ms")
    return float(text) if text else None


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with their time over that of the fastest own variant at the same op and shape."""
    own: dict[tuple[str, str], float] = {}
    for row in rows:
        ms = milliseconds(row)
        if ms is not None and variant_of(f"{row['op']}={row['variant']}").outside is None:
            place = row["op"], row["shape"]
            own[place] = min(ms, own.get(place, ms))
    out = []
    for row in rows:
        ms, ours = milliseconds(row), own.get((row["op"], row["shape"]))
        out.append({**row, "over ours": f"{ms / ours:.2f}" if ms is not None and ours else ""})
    return out


def line(values: Iterable[str]) -> str:
    """One row of the table."""
    return " ".join(f"{value:<{width}}" for value, width in zip(values, WIDTHS, strict=True)).rstrip()


def missing() -> list[str]:
    """What the table leaves out."""
    return [f"{name}: not installed, so its variants were not run" for name in PACKAGES if not installed(name)]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; ``--leg``, ``--choice`` and ``--rows`` are for the processes it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS, help="only these ops")
    parser.add_argument("--budget", type=float, default=115.0, metavar="SECONDS", help="of all processes together")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--leg", choices=(DETERMINISTIC, DEFAULT), help=argparse.SUPPRESS)
    parser.add_argument("--choice", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Time and print; 1 if a variant in deterministic mode did not repeat its bits, 2 without a CUDA device."""
    options = parsed(arguments)
    if options.leg:
        run_leg(options.leg, options.choice, options.rows)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device: nothing can be timed", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.budget
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for text in missing():
        print(text)
    print(line(COLUMNS), flush=True)
    rows: list[Row] = []
    for mode, choices in legs(options.op or OPS):
        before = len(rows)
        rows = with_ratios([*rows, *timed_leg(mode, choices, deadline)])
        for row in rows[before:]:
            print(line([row.get(name, "") for name in COLUMNS]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["mode"] == DETERMINISTIC and row.get("replays") == "differ" for row in rows))


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
