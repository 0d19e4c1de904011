"""The tax of determinism, row by row, on the GPUs at hand and within a time: one table, one picture.

    python -m tools.bench.tax_rows --out OUT --limit-s 290                   every row that fits the machine
    python -m tools.bench.tax_rows --out OUT --rows 'balanced;EP2' --pairs 8
    python -m tools.bench.tax_rows --out OUT --tiny                          rehearsal on a CPU, two small processes

Each row is ``megatron-determinism tax`` on examples/nemotron3_nano_proxy.sh, with as many pairs at once as there are
GPUs for. Time that is left is shared by the rows that are left; a row that fits no two legs is not begun, and said. OUT
gets ``tax_rows`` as .json (after every row), as .md and as .png. Exits with 1 where a row is over its limit, not sure
to be below it, failed or was not run.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.determinism.tax_legs import gpus_here
from tools.bench.ended import run_to_end
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/nemotron3_nano_proxy.sh"
NAME = "tax_rows"
BALANCED = "--moe-router-force-load-balancing"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
TINY = """
    --hybrid-layer-pattern ME*E --hidden-size 64 --seq-length 32 --max-position-embeddings 32 --num-attention-heads 4
    --kv-channels 16 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --vocab-size 509 --num-workers 0 --distributed-backend gloo
"""
LEG_GUESS_S = 50.0
LEAST_TURNS = 3
"""Both legs of a pair and, side by side or shorter, those that are profiled."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: so many GPUs, flags behind the example's, and the largest tax accepted, as a share."""

    name: str
    gpus: int
    flags: str
    max_tax: float


ROWS = (
    Row(name="balanced", gpus=1, flags=BALANCED, max_tax=0.010),
    Row(name="natural", gpus=1, flags="", max_tax=0.010),
    Row(
        name="TP2+SP",
        gpus=2,
        flags=f"{BALANCED} {TP2} --expert-model-parallel-size 2 --global-batch-size 4",
        max_tax=0.015,
    ),
    Row(name="EP2", gpus=2, flags=f"{BALANCED} --expert-model-parallel-size 2", max_tax=0.015),
    Row(name="DP2", gpus=2, flags=BALANCED, max_tax=0.015),
)
WORDS = {
    "balanced": "forced balance",
    "natural": "natural routing",
    "TP2+SP": "TP2 with sequence parallelism, EP2, 4 sequences",
    "EP2": "EP2, DP2, 8 sequences",
    "DP2": "DP2, 8 sequences",
}


def launch_of(row: Row, iterations: int, *, tiny: bool, wrapper: Sequence[str] = ()) -> list[str]:
    """The command of a row; one process needs no launcher around it. ``wrapper``: words before the script."""
    many = f"-m torch.distributed.run --standalone --nproc-per-node {row.gpus}" if row.gpus > 1 else ""
    launcher = " ".join([sys.executable, *many.split(), *wrapper])
    words = [*row.flags.split(), *(TINY.split() if tiny else ()), "--exit-interval", str(iterations)]
    return ["env", f"GPUS={row.gpus}", f"LAUNCHER={launcher}", "bash", EXAMPLE, *words]


def pairs_at_once(gpus: int, row: Row, pairs: int) -> tuple[int, int]:
    """How many pairs run at once, and how many in all: at least ``pairs``, so that no GPU idles."""
    at_once = max(1, gpus // row.gpus)
    return at_once, at_once * math.ceil(pairs / at_once)


def chosen(words: str) -> list[Row]:
    """The rows that are asked for, in the table's order; all where none is named.

    Raises:
        ValueError: there is no such row.
    """
    names = [word.strip() for word in words.split(";") if word.strip()]
    unknown = [name for name in names if name not in WORDS]
    if unknown:
        raise ValueError(f"no row {', '.join(unknown)}: {'; '.join(WORDS)}")
    return [row for row in ROWS if not names or row.name in names]


def measure(row: Row, options: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one row; its report, or why there is none."""
    at_once, pairs = pairs_at_once(len(options.gpus), row, options.pairs)
    command = [sys.executable, "-m", "megatron.determinism", "tax", "--json", "--pairs", str(pairs)]
    command += ["--at-once", str(1 if options.tiny else at_once), "--max-tax", str(row.max_tax)]
    command += ["--limit-s", f"{limit_s:.0f}", "--dir", str(folder)]
    command += ["--", *launch_of(row, options.iterations, tiny=options.tiny)]
    done = run_to_end(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        facts = json.loads(done.stdout)
    except ValueError:
        return {"status": "failed", "message": f"exit code {done.returncode}: {done.stdout[-2000:]}"}
    return {**facts, "status": "measured" if "tax" in facts else "failed"}


def run_rows(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure the rows one after the other; writes after each."""
    began, leg_s = time.monotonic(), LEG_GUESS_S
    facts: dict[str, Any] = {"gpus": len(options.gpus), "iterations": options.iterations, "rows": {}}
    for number, row in enumerate(options.chosen):
        left_s = options.limit_s - (time.monotonic() - began)
        if row.gpus > len(options.gpus):
            found: dict[str, Any] = {"status": "not run", "message": f"needs {row.gpus} GPUs"}
        elif left_s < LEAST_TURNS * leg_s:
            found = {"status": "not run", "message": f"{left_s:.0f} s left"}
        else:
            fitting = sum(other.gpus <= len(options.gpus) for other in options.chosen[number:])
            share_s = max(LEAST_TURNS * leg_s, left_s / fitting)
            found = measure(row, options, work / str(number), share_s)
            leg_s = found.get("leg_s", leg_s)
        facts["rows"][row.name] = {**found, "world_size": row.gpus}
        facts["seconds"] = time.monotonic() - began
        print(f"[{facts['seconds']:5.0f} s] {row.name:10} {found['message'].splitlines()[0]}", flush=True)
        write(options.out, facts)
    return facts


HEAD = ("GPUs", "row", "pairs", "fastest, s", "deterministic, s", "tax", "95% interval", "peak memory, GB", "idle",
        "exposed communication, ms")  # fmt: skip


def cells_of(name: str, row: Mapping[str, Any]) -> list[str]:
    """One row of the table, as ``HEAD``; figures of both legs as "fastest / deterministic"."""
    own = [str(row["world_size"]), WORDS[name]]
    if row["status"] != "measured":
        return [*own, f"{row['status']}: {row['message'].splitlines()[0]}", *[""] * (len(HEAD) - 3)]
    sides = row["baseline"], row["deterministic"]
    ends = "" if row["interval"] is None else "{:+.2%} to {:+.2%}".format(*row["interval"])
    steps = [f"{side['step_s']:.4f}" for side in sides]
    memory = _both(sides, "peak_memory_bytes", 1e-9, ".1f")
    idle, exposed = _both(sides, "gpu_idle_share", 100, ".1f"), _both(sides, "exposed_communication_s", 1e3, ".1f")
    return [
        *own,
        str(len(row["pairs"])),
        *steps,
        f"{row['tax']:+.2%}",
        ends,
        memory,
        f"{idle} %" if idle else "",
        exposed,
    ]


def _both(sides: Sequence[Mapping[str, Any]], key: str, scale: float, form: str) -> str:
    values = [side[key] for side in sides]
    return "" if None in values else " / ".join(format(value * scale, form) for value in values)


def markdown(facts: Mapping[str, Any]) -> str:
    """The table for documentation, and what the deterministic leg spends more, by group of kernels."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(cells_of(name, row)) for name, row in facts["rows"].items()]
    measured = {name: row for name, row in facts["rows"].items() if row["status"] == "measured" and row["where"]}
    if measured:
        groups = dict.fromkeys(group for row in measured.values() for group in row["where"])
        lines += ["", "More than the fastest, ms a step:", "", _line(["", *(WORDS[name] for name in measured)])]
        lines.append(_line(["---"] * (1 + len(measured))))
        for group in groups:
            lines.append(_line([group, *(f"{row['where'].get(group, 0.0) * 1e3:+.2f}" for row in measured.values())]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Draw each row's tax with its interval, its pairs and its limit, and where it goes."""
    rows = {name: row for name, row in facts["rows"].items() if row["status"] == "measured"}
    where = {name: row for name, row in rows.items() if row["where"]}
    figure = Figure(figsize=(9, 2.2 + 0.4 * len(rows) + 2.6 * len(where)))
    heights = [1.2 + 0.4 * len(rows), *[2.6] * len(where)]
    first, *others = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_taxes(first, rows)
    for axes, (name, row) in zip(others, where.items(), strict=True):
        values = [seconds * 1e3 for seconds in row["where"].values()]
        axes.barh(list(row["where"]), values, color=["#c33" if value > 0 else "#393" for value in values])
        axes.invert_yaxis()
        axes.set_xlabel(f"{name}: more than the fastest, ms a step")
        axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_taxes(axes: Axes, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for at, row in enumerate(rows.values()):
        ratios = [100 * (pair["ratio"] - 1) for pair in row["pairs"]]
        axes.plot(ratios, [at] * len(ratios), "o", color="#999", markersize=4)
        if row["interval"] is not None:
            axes.plot([100 * end for end in row["interval"]], [at, at], color="#36c", linewidth=3)
        axes.plot([100 * row["tax"]], [at], "D", color="#000")
        axes.plot([100 * row["max_tax"]] * 2, [at - 0.3, at + 0.3], color="#c33")
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="tax, % of a step; red: limit")
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what there is so far."""
    (folder / f"{NAME}.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    (folder / f"{NAME}.md").write_text(markdown(facts), "utf-8")
    draw(folder / f"{NAME}.png", facts)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of whoever measures the rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--rows", default="", help=f"rows, separated by ; (default: all of {'; '.join(WORDS)})")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, as if there were two GPUs")
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, the rows that are ``chosen``, and the names of the machine's ``gpus``."""
    options = parser.parse_args(words)
    try:
        options.chosen = chosen(options.rows)
    except ValueError as error:
        parser.error(str(error))
    options.gpus = ["0", "1"] if options.tiny else gpus_here()
    return options


def measure_all(options: argparse.Namespace, run: Callable[[argparse.Namespace, Path], dict[str, Any]]) -> bool:
    """Call ``run`` with the options and a folder to work in, print the table; whether every row is within its limit."""
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{NAME}_"))
    try:
        facts = run(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(markdown(facts))
    return all(row.get("verdict") == "within" for row in facts["rows"].values())


def main(words: Sequence[str]) -> int:
    """Measure, print and write; the exit code says whether every row is within its limit."""
    parser = build_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of a row, at least (6: the interval is exact)")
    parser.add_argument("--iterations", type=int, default=30, help="iterations of a leg; the first third is warm-up")
    return int(not measure_all(parse(parser, words), run_rows))


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
