"""Measures launch configurations of Triton kernels on this GPU and writes the faster ones as rows of the launch table.

    python -m tools.bench.tune --ops rms_norm,rope --budget-seconds 120 --out table.json

At the shapes of tools/bench/shapes.py, one kernel and one key of its configuration at a time, from what is used now. A
row is written if two measurements say that it takes at most 98% of that time, and its results have the same bits.
Keys that a kernel declares to change bits are tried only with --allow-new-bits: what an op computes then changes, and
with it the source hash in the manifests of runs. The file is written after each op and keeps the rows it had.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops import launch as launches
from megatron.core.ops.launch import Launch
from megatron.core.ops.launch_table import TABLE_FILE, Config, Key, table_of, text_of
from megatron.core.ops.registry import Variant
from tools.bench.ops import median_ms, outcomes, runs, selected, written_arguments
from tools.bench.shapes import WORKLOADS, Workload
from tools.command_line import run_tool

VARIANT = "deterministic_triton"
GAIN = 0.98


@dataclass(frozen=True, slots=True)
class Trial:
    """What one configuration did: its time, whether replays agreed, and whether they agreed with the present ones."""

    ms: float
    stable: bool = True
    same: bool = True


@dataclass(slots=True)
class Found:
    """The result of a search; ``best`` is ``present`` where nothing is enough faster."""

    present: Config
    best: Config
    ms: float
    present_ms: float
    tried: int = 0
    failed: int = 0
    unruly: list[Config] = field(default_factory=list)
    """Configurations that changed bits, against what their kernel declares."""


class Asked(dict[Key, Config]):
    """The table, and the keys that were looked up in it since it was last told to forget."""

    def __init__(self, table: dict[Key, Config]) -> None:
        super().__init__(table)
        self.keys_asked: list[Key] = []

    def get(self, key: Key, default: Any = None) -> Any:
        """As a dict's; the key is noted."""
        if key not in self.keys_asked:
            self.keys_asked.append(key)
        return super().get(key, default)


def climb(
    launch: Launch,
    present: Config,
    trial: Callable[[Config], Trial | None],
    expired: Callable[[], bool],
    *,
    allow_new_bits: bool,
) -> Found:
    """Change one key at a time as long as that is faster; the best is measured against ``present`` once more.

    ``trial`` gives ``None`` for a configuration that cannot run; of ``present`` it has to give a time.
    """
    base = trial(present)
    if base is None:
        raise ValueError(f"{launch.kernel} does not run as it is launched now: {present}")
    found, seen, moved = Found(present, present, base.ms, base.ms), [present], True
    while moved:
        moved = False
        for key, value in ((k, v) for k, values in launch.choices.items() for v in values):
            config = {**found.best, key: value}
            if config in seen or (key in launch.new_bits and not allow_new_bits):
                continue
            if expired():
                break
            seen.append(config)
            found.tried += 1
            result = trial(config)
            if result is None:
                found.failed += 1
            elif not result.stable or not (result.same or any(config[k] != present[k] for k in launch.new_bits)):
                found.unruly.append(config)
            elif result.ms < found.ms:
                found.best, found.ms, moved = config, result.ms, True
    again, base = (trial(found.best), trial(present)) if found.best != present else (None, None)
    if again is None or base is None or again.ms > GAIN * base.ms:
        found.best, found.ms = present, found.present_ms
    else:
        found.ms, found.present_ms = again.ms, base.ms
    return found


def trial_of(table: Asked, key: Key, work: Workload, run: Callable[[], tuple]) -> Callable[[Config], Trial | None]:
    """Runs the op with a configuration in the table's row ``key``; the first call says which bits are the present."""
    written = written_arguments(work)
    before = [tensor.clone() for tensor in written]
    present: list[torch.Tensor] = []

    def attempt(config: Config) -> Trial | None:
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        had = dict.get(table, key)
        table[key] = config
        try:
            replays = outcomes(work, run)
            first = [tensor.clone() for tensor in next(replays)]
            stable = all(same_bits(a, b) for found in replays for a, b in zip(first, found, strict=True))
            ms = median_ms(run)
        except Exception as error:
            # What Triton raises where a kernel does not compile or does not fit.
            if isinstance(error, (RuntimeError, ValueError)) or type(error).__module__.startswith("triton."):
                return None
            raise
        finally:
            del table[key]
            if had is not None:
                table[key] = had
        if not present:
            present.extend(first)
        return Trial(ms, stable, all(same_bits(a, b) for a, b in zip(present, first, strict=True)))

    return attempt


def launches_of(variant: Variant) -> dict[str, Launch]:
    """The kernels of a variant, by name."""
    modules = [sys.modules[module] for module in (variant.fn.__module__, *variant.sources)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Launch)]
    return {launch.kernel: launch for launch in found}


def measured_by(table: Asked, variant: Variant, work: Workload) -> list[tuple[Key, Callable[[], tuple]]]:
    """Each row that a workload asks for, with the run in which its kernel weighs most."""
    forward, both = runs(variant, work)
    out: dict[Key, Callable[[], tuple]] = {}
    for run in filter(None, (forward, both)):
        table.keys_asked.clear()
        run()
        for key in table.keys_asked:
            out.setdefault(key, run)
    return list(out.items())


def tuned(
    table: Asked, variant: Variant, work: Workload, deadline: float, *, allow_new_bits: bool
) -> Iterator[tuple[Key, Found]]:
    """Search for each row a workload asks for, and put what is found into the table. Time is shared equally."""
    known, rows = launches_of(variant), measured_by(table, variant, work)
    for at, (key, run) in enumerate(rows):
        until = share(deadline, len(rows) - at)
        launch = known[key[0]]
        present = dict.get(table, key) or launch.rule(*key[2])
        trial = trial_of(table, key, work, run)
        found = climb(launch, present, trial, lambda: time.monotonic() > until, allow_new_bits=allow_new_bits)  # noqa: B023
        if found.best != present:
            table[key] = found.best
        yield key, found


def share(deadline: float, parts: int) -> float:
    """When the first of ``parts`` equal parts of the time left is over."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


def write_rows(out: Path, rows: dict[Key, Config]) -> None:
    """Merge ``rows`` into the table at ``out``, in place of rows of the same keys; the file is whole at any time."""
    table = table_of(out.read_text("utf-8")) if out.is_file() else {}
    beside = out.with_name(out.name + ".part")
    beside.write_text(text_of({**table, **rows}), "utf-8")
    beside.replace(out)


def line(key: Key, found: Found) -> str:
    """One row of the report."""
    kernel, _, shape = key
    changed = {k: v for k, v in found.best.items() if found.present.get(k) != v}
    what = ", ".join(f"{k}={v}" for k, v in changed.items()) or "as it is"
    notes = f" {len(found.unruly)} changed bits: {found.unruly}" if found.unruly else ""
    counts = f"{found.tried} tried, {found.failed} failed"
    return f"{kernel:<22} {shape!s:<18} {found.present_ms:8.4f} {found.ms:8.4f}  {what} ({counts}){notes}"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", required=True, help=f"comma-separated, of {', '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, default=TABLE_FILE, help="table to merge rows into; default: the library's")
    parser.add_argument("--budget-seconds", type=float, default=600.0, help="shared equally by ops, shapes and kernels")
    parser.add_argument("--allow-new-bits", action="store_true", help="also try what changes an order of additions")
    options = parser.parse_args(arguments)
    options.ops = options.ops.split(",")
    if unknown := set(options.ops) - set(WORKLOADS):
        parser.error(f"no workloads for {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Tune, print and write; 2 without a CUDA device."""
    options = parsed(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing can be timed", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    launches.TABLE = table = Asked(launches.TABLE)
    deadline = time.monotonic() + options.budget_seconds
    print(f"{torch.cuda.get_device_name()}\n{'kernel':<22} {'shape class':<18} {'now ms':>8} {'best ms':>8}  change")
    wanted = selected(options.ops, [VARIANT])
    for at, (op, variant) in enumerate(wanted):
        op_deadline = share(deadline, len(wanted) - at)
        works, rows = WORKLOADS[op.spec.name](), {}
        for i, work in enumerate(works):
            work_deadline = share(op_deadline, len(works) - i)
            for key, found in tuned(table, variant, work, work_deadline, allow_new_bits=options.allow_new_bits):
                print(line(key, found), flush=True)
                if found.best != found.present:
                    rows[key] = found.best
        write_rows(options.out, rows)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
