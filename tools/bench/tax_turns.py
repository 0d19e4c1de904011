"""The tax of determinism by turns: both launches of a row are there at once and go on one at a time.

    python -m tools.bench.tax_turns --out OUT --rows 'balanced;natural;EP2'
    python -m tools.bench.tax_turns --out OUT --tiny                         rehearsal on a CPU

The rows are those of ``tools.bench.tax_rows``, and so are the files in OUT. Launches start up side by side, then take
turns of a few steps, forward and backward; each pair of turns gives a ratio, the first pair is warm-up. Whatever drifts
cancels, and a row costs one start-up: what it does not see is how launches differ among themselves. Rows of one GPU run
beside each other where there are GPUs for them. A GPU must hold two launches. Exits as ``tax_rows`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.determinism.leg_log import read_failure
from megatron.determinism.tax_legs import BASELINE, DETERMINISTIC, FLAGS
from megatron.determinism.tax_statistics import estimate, judge
from megatron.training.setup.environment import read_environment
from tools.bench.ended import stop, unwound
from tools.bench.tax_rows import ROOT, WORDS, Row, build_parser, launch_of, measure_all, parse, write
from tools.bench.turns_leg import starter_file, times_file, turn_file
from tools.command_line import run_tool

NAMES = (DETERMINISTIC, BASELINE)
POLL_S = 0.2
UNKNOWN = dict.fromkeys(("peak_memory_bytes", "gpu_idle_share", "exposed_communication_s"))


def groups_of(rows: Sequence[Row], gpus: int) -> list[list[Row]]:
    """Rows in order, in groups that fit the machine at once; a row that does not fit at all is a group of its own."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and sum(other.gpus for other in groups[-1]) + row.gpus <= gpus:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


class Launches:
    """Both launches of one row, on GPUs of their own. They end with the block, and without it where this process is
    killed: then nobody holds the lock any more."""

    def __init__(self, row: Row, folder: Path, gpus: Sequence[str], options: argparse.Namespace) -> None:
        self.row, self.folder = row, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: str | None = None
        folder.mkdir(parents=True)
        self._lock = starter_file(folder).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name in NAMES:
            words = [str(folder), ",".join(NAMES), name, str(options.turns), str(options.steps)]
            wrapper = ["-m", "tools.bench.turns_leg", *words]
            launch = launch_of(row, 1 + options.turns * options.steps, tiny=options.tiny, wrapper=wrapper)
            environment = {**read_environment(), **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
            with (folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    [*launch, *FLAGS[name]],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def open(self) -> None:
        """Let the first turn begin."""
        turn_file(self.folder, 0).touch()

    def done(self) -> bool:
        """Whether both have ended; one that fails takes the other with it."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        self._failed = self._failed or next((name for name, code in codes.items() if code), None)
        if self._failed:
            self.close()
        return self._failed is not None or all(code == 0 for code in codes.values())

    def close(self) -> None:
        """End what still runs; safe to call twice."""
        stop(self._processes.values())
        self._lock.close()

    def found(self) -> dict[str, Any]:
        """The row's figures, once all has ended."""
        times = {name: seconds_of(self.folder, name) for name in NAMES}
        pairs = min(map(len, times.values())) - 1
        if self._failed:
            words = read_failure(self.folder / f"{self._failed}.log", 1).words
            return {"status": "failed", "message": "; ".join(words)}
        if pairs < 1:
            return {"status": "not run", "message": "no time for two turns of each"}
        return figures(self.row, {name: of[1 : pairs + 1] for name, of in times.items()})


def seconds_of(folder: Path, name: str) -> list[float]:
    """What a launch has written of its turns."""
    path = times_file(folder, name)
    return [float(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def figures(row: Row, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A row as ``tax_rows`` has it, without what a profile says."""
    found = estimate(times[DETERMINISTIC], times[BASELINE])
    _, verdict, words = judge(found, row.max_tax)
    ratios = [d / b for d, b in zip(times[DETERMINISTIC], times[BASELINE], strict=True)]
    sides = {name: {**UNKNOWN, "step_s": statistics.median(of), "turns_s": list(of)} for name, of in times.items()}
    return {
        "status": "measured",
        "message": f"tax {found.text}{words}",
        "tax": found.tax,
        "interval": found.interval,
        "method": found.method,
        "max_tax": row.max_tax,
        "verdict": verdict,
        "pairs": [{"ratio": ratio} for ratio in ratios],
        "where": {},
        **sides,
    }


def run_groups(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure one group after the other; writes after each."""
    began = time.monotonic()
    facts: dict[str, Any] = {"gpus": len(options.gpus), "turns": options.turns, "steps": options.steps, "rows": {}}
    for group in groups_of(options.chosen, len(options.gpus)):
        if sum(row.gpus for row in group) > len(options.gpus):
            (row,) = group
            facts["rows"][row.name] = {"status": "not run", "message": f"needs {row.gpus} GPUs", "world_size": row.gpus}
            continue
        free = iter(options.gpus)
        places = [[next(free) for _ in range(row.gpus)] for row in group]
        with contextlib.ExitStack() as closing:
            launches = []
            for row, place in zip(group, places, strict=True):
                folder = work / str(list(WORDS).index(row.name))
                launches.append(Launches(row, folder, [] if options.tiny else place, options))
                closing.callback(launches[-1].close)
            _take_turns(launches, options.after, began + options.limit_s)
        for each in launches:
            found = each.found()
            facts["rows"][each.row.name] = {**found, "world_size": each.row.gpus}
            facts["seconds"] = time.monotonic() - began
            print(f"[{facts['seconds']:5.0f} s] {each.row.name:10} {found['message'].splitlines()[0]}", flush=True)
        write(options.out, facts)
    return facts


def _take_turns(launches: Sequence[Launches], after: Path | None, stop_at: float) -> None:
    """Until all have ended, or the monotonic time ``stop_at``; no turn begins before ``after`` is there."""
    opened = False
    while [each for each in launches if not each.done()] and time.monotonic() < stop_at:
        if not opened and (after is None or after.exists()):
            opened = True
            for each in launches:
                each.open()
        time.sleep(POLL_S)


def main(words: Sequence[str]) -> int:
    """Measure, print and write; the exit code says whether every row is within its limit."""
    parser = build_parser(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="turns of each launch; the first is warm-up")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--after", type=Path, help="no turn begins before this file is there: start up beside others")
    with unwound():
        return int(not measure_all(parse(parser, words), run_groups))


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
