"""``pretrain_hybrid.py`` that takes its steps in turns with another launch, on the same devices.

    torchrun ... -m tools.bench.turns_leg FOLDER NAMES NAME TURNS STEPS pretrain_hybrid.py FLAGS...

It starts up and takes its first step at once. Then the launches NAMES (with commas between them) go on one at a time,
forward and backward in turn, TURNS times each for STEPS steps. FOLDER holds one file per turn that may begin, the first
of them made by whoever started the launches, and ``NAME.times``, the seconds of a step in each turn of this launch.
Whoever started them keeps ``starter`` there locked; a launch that waits ends when that is over.
"""

from __future__ import annotations

import fcntl
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.determinism.tax_statistics import round_order
from megatron.training.setup.environment import rank_or_zero, read_environment
from tools.bench.wrapped_steps import around_steps, run_script, until

LOOK_S = 1.0


def turn_file(folder: Path, number: int) -> Path:
    """There when this turn, counted over all launches, may begin."""
    return folder / f"turn_{number:04d}"


def times_file(folder: Path, name: str) -> Path:
    """Seconds of a step in each turn of a launch."""
    return folder / f"{name}.times"


def starter_file(folder: Path) -> Path:
    """Locked by whoever started the launches, for as long as it is there to end them."""
    return folder / "starter"


def turns_of(name: str, names: Sequence[str], turns: int) -> Iterator[int]:
    """The numbers of one launch's turns."""
    for number in range(turns):
        yield number * len(names) + round_order(names, number).index(name)


class Turns:
    """One rank's side of it."""

    def __init__(self, folder: Path, name: str, numbers: Iterator[int], rank: int) -> None:
        self._folder, self._name, self._numbers, self._rank = folder, name, numbers, rank
        self._number = 0
        self._since = self._next_look = 0.0

    def begin(self) -> None:
        """Wait for the next turn.

        Raises:
            SystemExit: whoever started the launches is gone.
        """
        self._number = next(self._numbers)
        until(functools.partial(self._may_begin, turn_file(self._folder, self._number)))
        self._since = time.monotonic()

    def _may_begin(self, turn: Path) -> bool:
        if turn.exists():
            return True
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if _abandoned(self._folder):
                raise SystemExit("error: whoever started this launch is gone, and nobody would end it")
        return False

    def end(self, steps: int) -> None:
        """Let the next one begin."""
        if self._rank == 0:
            with times_file(self._folder, self._name).open("a", encoding="utf-8") as file:
                file.write(f"{(time.monotonic() - self._since) / steps}\n")
            turn_file(self._folder, self._number + 1).touch()


def _abandoned(folder: Path) -> bool:
    try:
        file = starter_file(folder).open()
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def take_turns(turns: Turns, count: int, steps: int) -> None:
    """``count`` turns of ``steps`` steps each, from the second step of this process on."""
    begins = [2 + turn * steps for turn in range(count)]
    around_steps(
        before=dict.fromkeys(begins, turns.begin),
        after={first + steps - 1: functools.partial(turns.end, steps) for first in begins},
    )


def main(words: Sequence[str]) -> None:
    """Run the script in turns."""
    folder, names, name, turns, steps, script, *flags = words
    rank = rank_or_zero(read_environment())
    numbers = turns_of(name, names.split(","), int(turns))
    take_turns(Turns(Path(folder), name, numbers, rank), int(turns), int(steps))
    run_script(Path(script), flags)


if __name__ == "__main__":
    main(sys.argv[1:])
