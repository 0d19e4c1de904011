"""``pretrain_hybrid.py`` that takes its steps in turns with another launch, on the same devices.

    torchrun ... -m tools.bench.turns_leg FOLDER NAMES NAME TURNS STEPS pretrain_hybrid.py FLAGS...

It starts up and takes its first step at once. Then the launches NAMES (with commas between them) go on one at a time,
forward and backward in turn, TURNS times each for STEPS steps. FOLDER holds one file per turn that may begin, the first
of them made by whoever started the launches, and ``NAME.times``, the seconds of a step in each turn of this launch.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.determinism.tax_statistics import round_order
from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics
from megatron.training.setup.environment import rank_or_zero, read_environment
from tools.bench.one_node_gate import POLL_S, wait


def turn_file(folder: Path, number: int) -> Path:
    """There when this turn, counted over all launches, may begin."""
    return folder / f"turn_{number:04d}"


def times_file(folder: Path, name: str) -> Path:
    """Seconds of a step in each turn of a launch."""
    return folder / f"{name}.times"


def turns_of(name: str, names: Sequence[str], turns: int) -> Iterator[int]:
    """The numbers of one launch's turns."""
    for number in range(turns):
        yield number * len(names) + round_order(names, number).index(name)


class Turns:
    """One rank's side of it."""

    def __init__(self, folder: Path, name: str, numbers: Iterator[int], rank: int) -> None:
        self._folder, self._name, self._numbers, self._rank = folder, name, numbers, rank
        self._number: int | None = None
        self._since = 0.0

    def begin(self) -> None:
        """Wait for the next turn; behind the last one there is nothing to wait for."""
        self._number = next(self._numbers, None)
        while self._number is not None and not turn_file(self._folder, self._number).exists():
            time.sleep(POLL_S)
        self._since = time.monotonic()

    def end(self, steps: int) -> None:
        """Let the next one begin."""
        if self._rank == 0 and self._number is not None:
            with times_file(self._folder, self._name).open("a", encoding="utf-8") as file:
                file.write(f"{(time.monotonic() - self._since) / steps}\n")
            turn_file(self._folder, self._number + 1).touch()


def take_turns(turns: Turns, steps: int) -> None:
    """From the second step of this process on; what is queued is done before a turn ends."""
    step, taken = TrainStep.run, 0

    def in_turn(self: TrainStep, *args: Any, **kwargs: Any) -> StepMetrics:
        nonlocal taken
        place = (taken - 1) % steps
        if taken and place == 0:
            wait()
            turns.begin()
        metrics = step(self, *args, **kwargs)
        if taken and place == steps - 1:
            wait()
            turns.end(steps)
        taken += 1
        return metrics

    TrainStep.run = in_turn  # type: ignore[method-assign]


def main(words: Sequence[str]) -> None:
    """Run the script in turns."""
    folder, names, name, turns, steps, script, *flags = words
    rank = rank_or_zero(read_environment())
    numbers = turns_of(name, names.split(","), int(turns))
    take_turns(Turns(Path(folder), name, numbers, rank), int(steps))
    sys.argv = [script, *flags]
    runpy.run_path(os.fspath(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
