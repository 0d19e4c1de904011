"""``pretrain_hybrid.py`` that starts up and takes its first step at once, and goes on when its devices are free.

    python -m torch.distributed.run ... -m tools.bench.one_node_gate LOCKS FOLDER DEVICES LANES STEPS FLAGS...

Starting takes the CPU, and the first step compiles kernels, so launches do that side by side. Later steps do not: GPUs
share their time between processes in slices, and ranks that wait for a message would wait for a slice each. A device is
a file in LOCKS; there are LANES of them, and a launch holds the files of all its DEVICES in one lane for STEPS steps.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics
from megatron.training.setup.environment import rank_or_zero, read_environment

POLL_S = 0.02
WORDS = "gate: waited {waited:.2f} s, held {held:.2f} s"
"""What the first rank prints when it has left."""


class Gate:
    """The first rank takes the devices; the others see it in ``folder``."""

    def __init__(self, locks: Path, folder: Path, devices: Sequence[str], lanes: int) -> None:
        self._locks, self._open, self._devices, self._lanes = locks, folder / "open", devices, lanes
        self._held: list[IO[str]] = []
        self._waited_s = self._since = 0.0

    def enter(self, rank: int) -> None:
        """Wait until the launch may go on."""
        began = time.monotonic()
        if rank == 0:
            while not any(self._take(lane) for lane in range(self._lanes)):
                time.sleep(POLL_S)
            self._open.touch()
        while not self._open.exists():
            time.sleep(POLL_S)
        self._since = time.monotonic()
        self._waited_s = self._since - began

    def leave(self, rank: int) -> None:
        """Let others in."""
        for file in self._held:
            file.close()
        if rank == 0 and self._held:
            print(WORDS.format(waited=self._waited_s, held=time.monotonic() - self._since), flush=True)
        self._held = []

    def _take(self, lane: int) -> bool:
        """All devices or none: two launches never wait for each other."""
        taken: list[IO[str]] = []
        for device in self._devices:
            file = (self._locks / f"{lane}_{device}").open("w")
            taken.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for other in taken:
                    other.close()
                return False
        self._held = taken
        return True


def gate_steps(gate: Gate, rank: int, steps: int) -> None:
    """Enter before the second step of this process, leave after step number ``steps``; what is queued is done first."""
    step, taken = TrainStep.run, 0

    def gated(self: TrainStep, *args: Any, **kwargs: Any) -> StepMetrics:
        nonlocal taken
        taken += 1
        if taken == 2:
            wait()
            gate.enter(rank)
        metrics = step(self, *args, **kwargs)
        if taken == max(2, steps):
            wait()
            gate.leave(rank)
        return metrics

    TrainStep.run = gated  # type: ignore[method-assign]


def wait() -> None:
    """Until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(words: Sequence[str]) -> None:
    """Run the script behind the gate."""
    locks, folder, devices, lanes, steps, *flags = words
    rank = rank_or_zero(read_environment())
    gate_steps(Gate(Path(locks), Path(folder), devices.split(","), int(lanes)), rank, int(steps))
    script = Path(__file__).resolve().parents[2] / "pretrain_hybrid.py"
    sys.argv = [str(script), *flags]
    runpy.run_path(os.fspath(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
