"""``pretrain_hybrid.py`` that starts up and takes its first step at once, and goes on when its devices are free.

    python -m torch.distributed.run ... -m tools.bench.one_node_gate LOCKS FOLDER DEVICES LANES STEPS FLAGS...

Starting takes the CPU, and the first step compiles kernels, so launches do that side by side. Later steps do not: GPUs
share their time between processes in slices, and ranks that wait for a message would wait for a slice each. A device is
a file in LOCKS; there are LANES of them, and a launch holds the files of all its DEVICES in one lane for STEPS steps.
"""

from __future__ import annotations

import fcntl
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from megatron.training.setup.environment import rank_or_zero, read_environment
from tools.bench.wrapped_steps import around_steps, run_script, until

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
            until(lambda: any(self._take(lane) for lane in range(self._lanes)))
            self._open.touch()
        until(self._open.exists)
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


def main(words: Sequence[str]) -> None:
    """Run the script behind the gate: from its second step on, to the end of step number STEPS."""
    locks, folder, devices, lanes, steps, *flags = words
    rank = rank_or_zero(read_environment())
    gate = Gate(Path(locks), Path(folder), devices.split(","), int(lanes))
    around_steps(
        before={2: functools.partial(gate.enter, rank)}, after={max(2, int(steps)): functools.partial(gate.leave, rank)}
    )
    run_script(Path(__file__).resolve().parents[2] / "pretrain_hybrid.py", flags)


if __name__ == "__main__":
    main(sys.argv[1:])
