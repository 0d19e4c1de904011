"""Legs of a measurement: fresh launches of the user's command, each into a folder of its own, and what they took."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.config.numerics import FASTEST, FLOAT_SUMS, NATIVE
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.verify import names_flag, run_leg
from megatron.training.config.manifest import MANIFEST_FILE
from megatron.training.setup.environment import read_environment

BASELINE, DETERMINISTIC = "baseline", "deterministic"
FLAGS = {
    BASELINE: ("--no-deterministic-mode", "--op-variants", FASTEST),
    DETERMINISTIC: ("--deterministic-mode",),
}
OUTPUTS = {"--fingerprint-dir": "fingerprint", "--trace-dir": "trace"}
"""Folders a command may name whose writing is part of a step; where it does, each leg gets one of its own."""
UNWRITTEN = {"--save": 1, "--tensorboard-dir": 1, "--async-save": 0}
"""Flags, and how many values they take, of what is written between steps; the legs go without."""
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
RUN_DIR = "run"
PROFILED_STEPS = 3
MAX_WARM_UP = 10


class LegFailedError(Exception):
    """A leg did not do what it was run for; holds the outcome to report."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.verdict)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One leg: its folder, iterations behind the warm-up, their median time in seconds, all losses, its manifest, and
    how long it took from start to end in seconds."""

    folder: Path
    wall_s: float
    iterations: tuple[int, ...]
    step_s: float
    losses: tuple[Any, ...]
    manifest: Mapping[str, Any]

    @property
    def deterministic(self) -> bool:
        """Whether it ran in deterministic mode."""
        return bool(self.manifest["launch"]["switches"]["deterministic_algorithms"])

    @property
    def ops(self) -> dict[str, str]:
        """The variant of every op."""
        return {op: facts["variant"] for op, facts in self.manifest["trajectory"]["ops"].items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Legs:
    """Runs legs of one command. ``warm_up``: iterations to leave out; ``None``: a third, 1 to 10. ``gpu_sets``: the
    devices of each place where legs run; none: one place, the whole machine."""

    launch: Sequence[str]
    folder: Path
    warm_up: int | None
    gpu_sets: Sequence[str] = ()
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    @contextlib.contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        """Threads that run legs, one a place. What ends the block before its end stops the legs under way."""
        with ThreadPoolExecutor(self.places) as threads, contextlib.ExitStack() as failing:
            failing.callback(self._over.set)
            yield threads
            failing.pop_all()

    @property
    def places(self) -> int:
        """How many legs run side by side."""
        return max(1, len(self.gpu_sets))

    def run(self, name: str, flags: Iterable[str], place: int = 0) -> Leg:
        """Run one leg in a fresh process; ``name`` is its folder's.

        Raises:
            LegFailedError: it failed, or did not leave what a run leaves.
        """
        leg = self.folder / name
        leg.mkdir()
        words = [*without(self.launch, UNWRITTEN), *flags, "--run-dir", str(leg / RUN_DIR)]
        for flag, folder in OUTPUTS.items():
            if names_flag(self.launch, flag):
                words += [flag, str(leg / folder)]
        began = time.monotonic()
        left = leg / RUN_DIR / MANIFEST_FILE
        failure = run_leg(words, leg / "output.log", self._environment(place), self._over.is_set, leaves=left)
        wall_s = time.monotonic() - began
        if self._over.is_set():
            raise _damaged(f"{name} was stopped")
        # One write a line: print writes the text and its end apart, and legs beside this one end at the same time.
        sys.stderr.write(f"{name} ... {'failed' if failure else 'done'} in {wall_s:.0f} s\n")
        sys.stderr.flush()
        if failure is not None:
            raise LegFailedError(failure)
        return self._read(leg, wall_s)

    def _environment(self, place: int) -> dict[str, str]:
        """The devices of a place, and a port that no other leg has, for launchers that are told none."""
        if not self.gpu_sets:
            return {}
        port = str(free_port())
        return {"CUDA_VISIBLE_DEVICES": self.gpu_sets[place], "MASTER_PORT": port, "PET_MASTER_PORT": port}

    def _read(self, leg: Path, wall_s: float) -> Leg:
        metrics, manifest = leg / RUN_DIR / "metrics.jsonl", leg / RUN_DIR / "manifest.json"
        try:
            records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
            facts = json.loads(manifest.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(f"{leg} has no readable metrics.jsonl and manifest.json: {error}") from error
        steps = [record for record in records if record["kind"] == "train"]
        warm_up = min(MAX_WARM_UP, max(1, len(steps) // 3)) if self.warm_up is None else self.warm_up
        kept = steps[warm_up:]
        if not kept:
            raise _damaged(f"{leg}: {len(steps)} iterations, and {warm_up} of them are warm-up; train for longer")
        return Leg(
            folder=leg,
            wall_s=wall_s,
            iterations=tuple(step["iteration"] for step in kept),
            step_s=statistics.median(step["elapsed_s"] for step in kept),
            losses=tuple(step["losses"] for step in steps),
            manifest=facts,
        )

    def profile(self, name: str, flags: Sequence[str], like: Leg, place: int = 0) -> Leg:
        """Run one leg more with a few of the iterations of ``like`` profiled on every rank, and stop behind them."""
        first = like.iterations[0]
        last = min(first + PROFILED_STEPS - 1, like.iterations[-1])
        ranks = [str(rank) for rank in range(like.manifest["launch"]["world_size"])]
        window = ["--profile-step-start", str(first), "--profile-step-end", str(last + 1)]
        own = ["--profile", "--use-pytorch-profiler", *window, "--profile-ranks", *ranks, "--exit-interval", str(last)]
        return self.run(name, [*flags, *own], place)


def without(launch: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """A command line without some flags and as many values behind each as it takes."""
    kept, skipped = [], 0
    for word in launch:
        if word in flags:
            skipped = flags[word]
        elif skipped:
            skipped -= 1
        elif word.partition("=")[0] not in flags:
            kept.append(word)
    return kept


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def gpus_here() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that processes started here see."""
    # A process of its own: this one needs no torch.
    done = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, check=True)
    named = [name for name in read_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(int(done.stdout))])[: int(done.stdout)]


def split_gpus(gpus: Sequence[str], sets: int) -> list[str]:
    """So many disjoint sets of equally many GPUs, of neighbours, as large as they can be."""
    each = len(gpus) // sets
    return [",".join(gpus[start : start + each]) for start in range(0, sets * each, each)]


def _damaged(words: str) -> LegFailedError:
    return LegFailedError(Outcome(exit=Exit.DAMAGED, verdict=words))


def usage(leg: Leg, step_s: float) -> dict[str, Any]:
    """What a profiled leg used, a mean over ranks of figures per step; a GPU's are ``None`` without one.

    ``step_s`` is the time of a step that was not profiled: kernels take as long with the profiler, the host longer.

    Raises:
        LegFailedError: the leg left no profile.
    """
    ranks = [json.loads(path.read_text("utf-8")) for path in sorted((leg.folder / RUN_DIR).glob("profile_rank_*.json"))]
    if not ranks:
        raise _damaged(f"{leg.folder} has no profile_rank_*.json")
    facts = {
        "device": ranks[0]["device"],
        "peak_host_memory_bytes": max(rank["peak_host_memory_bytes"] for rank in ranks),
        **dict.fromkeys(("peak_memory_bytes", "gpu_utilisation", "gpu_idle_share", "gpu_busy_s", "launches")),
        **dict.fromkeys(("communication_s", "exposed_communication_s", "kernel_groups", "kernels")),
    }
    if any(rank["gpu"] is None for rank in ranks):
        return facts
    mean = {
        key: statistics.mean(rank["gpu"][key] for rank in ranks)
        for key in ("busy_s", "launches", "communication_s", "exposed_communication_s")
    }
    groups = dict.fromkeys(group for rank in ranks for group in rank["gpu"]["groups"])
    busy = min(1.0, mean["busy_s"] / step_s)
    return {
        **facts,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "gpu_utilisation": busy,
        "gpu_idle_share": 1.0 - busy,
        "gpu_busy_s": mean.pop("busy_s"),
        **mean,
        "kernel_groups": {
            group: statistics.mean(rank["gpu"]["groups"].get(group, {"seconds": 0.0})["seconds"] for rank in ranks)
            for group in groups
        },
        "kernels": ranks[0]["gpu"]["kernels"],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One thing that is switched to its fastest form by itself; ``flags`` is empty where there is nothing to switch,
    and ``note`` says why."""

    name: str
    flags: tuple[str, ...]
    note: str


KNOB_OPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "attention_dropout"),
    "SSD": ("ssd_scan",),
    "conv": ("causal_conv1d",),
    "MoE": (
        "moe_permute",
        "moe_unpermute",
        "router_balance",
        "router_table",
        "router_topk",
        "router_weights",
        "grouped_gemm",
        "grouped_grad",
    ),
    "cross entropy": ("cross_entropy_stats", "cross_entropy_grad"),
}
"""Ops by knob; the rest is one knob more."""


def knobs_of(deterministic: Leg, baseline: Leg) -> list[Knob]:
    """The knobs, and which of them make a difference: two variants of one op that are the same are not run again."""
    fast, ours = baseline.ops, deterministic.ops
    named = {op for ops in KNOB_OPS.values() for op in ops}
    found = []
    for name, ops in {**KNOB_OPS, "other ops": tuple(op for op in ours if op not in named)}.items():
        changed = [op for op in ops if fast.get(op) != ours.get(op)]
        words = ",".join(f"{op}={fast[op]}" for op in changed)
        note = "; ".join(f"{op}: {ours[op]}, fastest {fast[op]}" for op in changed)
        flags = (*FLAGS[DETERMINISTIC], "--op-variants", words) if changed else ()
        found.append(Knob(name=name, flags=flags, note=note or "the deterministic variant is the fastest there is"))
    alone = deterministic.manifest["launch"]["world_size"] == 1
    found.append(
        Knob(
            name="collectives",
            flags=() if alone else (*FLAGS[DETERMINISTIC], "--op-variants", f"{FLOAT_SUMS}={NATIVE}"),
            note="one process: nothing is added over ranks" if alone else "the backend's reductions",
        )
    )
    pinned = ",".join(f"{op}={variant}" for op, variant in sorted(ours.items()))
    found.append(
        Knob(
            name="torch's switches",
            flags=("--no-deterministic-mode", "--op-variants", pinned),
            note="same ops and sums without --deterministic-mode: its environment and all of torch's switches",
        )
    )
    return [*found, *_switch_knobs(deterministic, baseline)]


def _switch_knobs(deterministic: Leg, baseline: Leg) -> list[Knob]:
    """Memory fill and autotuning have no flag of their own: said from the manifests, timed with all switches."""
    ours, fast = ({**leg.manifest["launch"]["switches"]} for leg in (deterministic, baseline))
    fills = [s["deterministic_algorithms"] and s["fill_uninitialized_memory"] for s in (ours, fast)]
    tunes = [s["cudnn_benchmark"] for s in (ours, fast)]
    return [
        Knob(name=name, flags=(), note="off in both" if not any(on) else "differs: part of torch's switches")
        for name, on in (("memory fill", fills), ("autotune", tunes))
    ]
