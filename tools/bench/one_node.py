"""The contract at the size of one host: every layout that fits 2, 4 or 8 GPUs, launched, stopped, moved and compared.

    python -m tools.bench.one_node --out OUT                          all GPUs of this machine
    python -m tools.bench.one_node --out OUT --limit-s 280 --proxy 1  within a time, and one layout of a large model
    python -m tools.bench.one_node --out OUT --gpus 8 --shared        the layouts of eight, on the GPUs there are
    python -m tools.bench.one_node --out OUT --gpus 2 --tiny --steps 6 --stop 3     rehearsal on a CPU

Launches start up side by side (``--at-once``); their steps take turns (``tools/bench/one_node_gate.py``), so step times
are those of a machine at rest. What every launch is compared with is in ``tools/bench/one_node_plan.py``. OUT gets
``one_node`` as .json (after every launch), as .md and as .png. Exits with 1 where a promise is broken or a launch
failed, or nothing could be compared; what there was no time for is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megatron.determinism.compare import compare
from megatron.determinism.leg_log import read_failure
from megatron.determinism.report import Exit
from megatron.training.setup.environment import read_environment
from tools.bench.ended import stop, unwound
from tools.bench.one_node_plan import MODEL, SHARED, TINY, Launch, Plan, flags_of, plan, proxies
from tools.bench.one_node_report import NAME, table, write_report
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
PROXY = "examples/nemotron3_nano_proxy.sh"
TIME = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
LOSS = re.compile(r"lm loss: (\S+)")
GATE = re.compile(r"gate: waited ([\d.]+) s, held ([\d.]+) s")
LOG = "output.log"
WARM_UP = 3
FIRST_GUESS_S, PROXY_GUESS_S = 60.0, 90.0
POLL_S = 0.1


@dataclass(kw_only=True)
class Running:
    """A launch under way."""

    launch: Launch
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


class Session:
    """Runs the launches of a plan and keeps what came of each, by name."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.began = time.monotonic()
        self.results: dict[str, dict[str, Any]] = {}
        self.running: list[Running] = []
        self._numbers: dict[str, int] = {}
        (work / "locks").mkdir()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.options.limit_s - self.elapsed_s

    def folder(self, name: str) -> Path:
        """Where a launch leaves its things."""
        return self.work / str(self._numbers.setdefault(name, len(self._numbers)))

    def expected_s(self, launch: Launch) -> float:
        """How long a launch should take: what those before it took."""
        alike = [r["seconds"] for r in self.results.values() if r["seconds"] and r["proxy"] == launch.proxy]
        return 1.2 * statistics.median(alike) if alike else PROXY_GUESS_S if launch.proxy else FIRST_GUESS_S

    def run(self, launches: Sequence[Launch]) -> None:
        """Run all launches, as many at once as may be, each after the one it goes on from."""
        waiting = list(launches)
        while waiting or self.running:
            for launch in list(waiting):
                if self._begin_or_drop(launch):
                    waiting.remove(launch)
            if self.left_s < 0:
                for running in self.running:
                    running.process.terminate()
            for running in list(self.running):
                self._end(running)
            time.sleep(POLL_S)

    def _begin_or_drop(self, launch: Launch) -> bool:
        """Whether the launch has begun, or never will."""
        source = self.results.get(launch.source or "")
        if source is not None and source["status"] != "ran":
            self._note(launch, "not run", seen=f"{launch.source} did not run to its end")
            return True
        if self.left_s < self.expected_s(launch):
            self._note(launch, "not run", seen="no time left")
            return True
        full = len(self.running) >= (1 if launch.proxy else self.options.at_once)
        if full or (launch.source is not None and source is None):
            return False
        self._begin(launch)
        return True

    def _begin(self, launch: Launch) -> None:
        folder = self.folder(launch.name)
        folder.mkdir()
        environment = read_environment()
        given = environment.get("CUDA_VISIBLE_DEVICES", "")
        devices = given.split(",") if given else [str(device) for device in range(self.options.devices)]
        own = ",".join(dict.fromkeys(devices[device % len(devices)] for device in launch.devices))
        changed = {"CUDA_VISIBLE_DEVICES": own, "OMP_NUM_THREADS": "1", "GPUS": str(launch.layout.ranks)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        log = (folder / LOG).open("wb")
        process = subprocess.Popen(
            self.command(launch, own),
            cwd=ROOT,
            env={**environment, **changed, "LAUNCHER": " ".join(launcher(launch.layout.ranks))},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.running.append(Running(launch=launch, process=process, log=log, began=time.monotonic()))

    def command(self, launch: Launch, devices: str) -> list[str]:
        """The command line of a launch."""
        folder = self.folder(launch.name)
        flags = flags_of(launch, self.options.steps, self.options.sizes)
        places = ["--fingerprint-dir", str(folder / "fingerprint")]
        if launch.saved:
            places += ["--save", str(folder / "checkpoints"), "--save-interval", "1000000"]
        if launch.source is not None:
            places += ["--load", str(self.folder(launch.source) / "checkpoints"), "--exit-on-missing-checkpoint"]
        if launch.proxy:
            return ["bash", PROXY, *flags, *places, "--run-dir", str(folder / "run")]
        steps, gate = launch.last - launch.first + 1, ["-m", "tools.bench.one_node_gate", str(self.work / "locks")]
        gate += [str(folder), devices, str(self.options.training_at_once), str(steps)]
        return [*launcher(launch.layout.ranks), *gate, *flags, *places]

    def _end(self, running: Running) -> None:
        code, late = running.process.poll(), self.left_s < 0
        if code is None and not late:
            return
        if code is None:
            stop([running.process])
        self.running.remove(running)
        running.log.close()
        folder, seconds = self.folder(running.launch.name), time.monotonic() - running.began
        if code == 0:
            self._note(running.launch, "ran", seconds=seconds, **figures(folder))
        elif late:
            self._note(running.launch, "not run", seen="stopped at the time limit")
        else:
            words = read_failure(folder / LOG, code).words
            self._note(running.launch, "failed", seconds=seconds, seen="\n".join(words))

    def _note(self, launch: Launch, status: str, seconds: float | None = None, **more: Any) -> None:
        layout = launch.layout
        facts = {"layout": layout.name, "recipe": layout.recipe.name, "ranks": layout.ranks, "role": launch.role}
        facts |= {"devices": list(launch.devices), "iterations": [launch.first, launch.last], "proxy": launch.proxy}
        facts |= {"against": launch.against, "same": launch.same, "status": status, "seconds": seconds}
        self.results[launch.name] = {**facts, "good": False if status == "failed" else None, "seen": "", **more}
        for name in dict.fromkeys([launch.name, *self._compare()]):
            self._say(name)
        self.write()

    def _say(self, name: str) -> None:
        facts, ended = self.results[name], len(self.results)
        took = "" if facts["seconds"] is None else f"{facts['seconds']:.1f} s"
        lines = facts["seen"].strip().splitlines() or [facts["status"]]
        word = {None: "", True: "ok", False: "BAD"}[facts["good"]]
        print(f"[{self.elapsed_s:5.0f} s] {ended:2} {word:4}{took:>8}  {name:36} {lines[-1][:90]}", flush=True)

    def _compare(self) -> list[str]:
        """Compare what can be compared by now; the names of those that were."""
        done = []
        for name, facts in self.results.items():
            other = self.results.get(facts["against"] or "")
            if facts["status"] != "ran" or facts["good"] is not None or other is None:
                continue
            if other["status"] == "ran":
                facts["good"], facts["seen"] = self._verdict(name, facts)
                done.append(name)
            else:
                facts["seen"] = f"{facts['against']} did not run to its end"
        return done

    def _verdict(self, name: str, facts: dict[str, Any]) -> tuple[bool, str]:
        sides = [self.folder(of) / "fingerprint" for of in (facts["against"], name)]
        outcome = compare(*sides, force=not facts["same"])
        if not facts["same"]:
            return outcome.exit == Exit.DIFFERENT, outcome.verdict
        first, last = facts["iterations"]
        span = [outcome.facts.get(key) for key in ("first_iteration", "last_iteration", "common_iterations")]
        whole = outcome.exit == Exit.SAME and span == [first, last, last - first + 1]
        return whole, "\n".join([*outcome.details, outcome.verdict]) if not whole else outcome.verdict

    def write(self) -> dict[str, Any]:
        """Write what there is so far."""
        options = self.options
        facts = {
            "place": options.place,
            "torch": torch.__version__,
            "gpus": options.gpus,
            "devices": options.devices,
            "steps": options.steps,
            "stop": options.stop,
            "seconds": self.elapsed_s,
            "left_out": list(options.left_out),
            "launches": self.results,
        }
        part = options.out / f"{NAME}.part"
        part.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        part.replace(options.out / f"{NAME}.json")
        return facts


def launcher(ranks: int) -> list[str]:
    """What starts so many processes; the meeting place is one of its own."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def figures(folder: Path) -> dict[str, Any]:
    """What a launch says of itself: median step in milliseconds behind the warm-up, losses, time at the gate, and the
    most memory of a GPU in bytes where it was profiled."""
    log = (folder / LOG).read_text("utf-8", errors="replace")
    steps, losses, gate = TIME.findall(log), LOSS.findall(log), GATE.search(log)
    peaks = [json.loads(path.read_text("utf-8")) for path in sorted((folder / "run").glob("profile_rank_*.json"))]
    known = [rank["peak_memory_bytes"] for rank in peaks if rank["peak_memory_bytes"]]
    return {
        "step_ms": statistics.median(map(float, steps[WARM_UP:] or steps)) if steps else None,
        "losses": [float(losses[0]), float(losses[-1])] if losses else None,
        "waited_s": float(gate[1]) if gate else None,
        "held_s": float(gate[2]) if gate else None,
        "peak_memory_bytes": max(known) if known else None,
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``at_once`` and ``gpus`` from the machine where they are not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--gpus", type=int, help="2, 4 or 8 (default: those of this machine)")
    parser.add_argument("--steps", type=int, default=50, help="iterations of a whole launch")
    parser.add_argument("--stop", type=int, default=20, help="iteration to stop after and go on from")
    parser.add_argument("--at-once", type=int, help="launches started side by side (default: two cores a rank)")
    parser.add_argument("--training-at-once", type=int, default=1, help="launches that step on one GPU at a time")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="layouts, by parts of their names, separated by ;")
    parser.add_argument("--proxy", type=int, default=0, help="layouts of the Nano proxy with 128 experts, 0 to 2")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--tiny", action="store_true", help="a small model over gloo: a rehearsal on the CPU")
    model.add_argument(
        "--shared", action="store_true", help="a smaller one over gloo: --gpus are ranks that share GPUs"
    )
    options = parser.parse_args(words)
    there = torch.cuda.device_count()
    if options.shared and not there:
        parser.error("--shared needs a GPU; --tiny is for a CPU")
    if options.shared and options.proxy:
        parser.error("--proxy needs a GPU for every rank")
    if options.gpus is None:
        options.gpus = there
    options.devices = there if options.shared else options.gpus
    options.sizes = TINY if options.tiny else SHARED if options.shared else MODEL
    kind = "cpu" if options.tiny or not there else torch.cuda.get_device_name()
    ranks = f"{options.gpus} ranks on " if options.tiny or options.shared else ""
    options.place = ranks + (kind if kind == "cpu" else f"{options.devices} x {kind}")
    if options.at_once is None:
        options.at_once = max(1, int((os.cpu_count() or 1) / (2 * max(1, options.gpus))))
    try:
        options.plan = plan(options.gpus, options.steps, options.stop)
    except ValueError as error:
        parser.error(str(error))
    options.left_out = options.plan.left_out
    return options


def chosen(whole: Plan, only: str) -> list[Launch]:
    """The launches of the layouts that are asked for, and those that they go on from or are compared with."""
    parts = [part.strip() for part in only.split(";") if part.strip()]
    names = {x.name for x in whole.launches if not parts or any(part in x.name for part in parts)}
    for launch in reversed(whole.launches):
        if launch.name in names:
            names |= {name for name in (launch.source, launch.against) if name}
    return [launch for launch in whole.launches if launch.name in names]


def main(words: Sequence[str]) -> int:
    """Run, print and write; the exit code says whether every promise was kept."""
    options = parse(words)
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="one_node_"))
    session = Session(options, work)
    launches = chosen(options.plan, options.only)
    print(f"{len(launches)} launches, {options.place}, {options.at_once} at once", flush=True)
    with unwound():
        try:
            session.run(launches)
            session.run(proxies(options.gpus, options.proxy))
            facts = session.write()
            write_report(options.out, facts)
            print(table(facts))
        finally:
            stop(running.process for running in session.running)
            shutil.rmtree(work, ignore_errors=True)
    seen = [launch["good"] for launch in facts["launches"].values()]
    return int(False in seen or True not in seen)


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
