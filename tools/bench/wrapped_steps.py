"""``pretrain_hybrid.py`` that waits for something between its steps, as launches do that share devices."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics

POLL_S = 0.02


def until(there: Callable[[], bool]) -> None:
    """Wait for it."""
    while not there():
        time.sleep(POLL_S)


def around_steps(before: dict[int, Callable[[], None]], after: dict[int, Callable[[], None]]) -> None:
    """From now on a step of this process, counted from 1, begins behind what ``before`` has for it, and what ``after``
    has for it follows. Both find the device idle."""
    step, taken = TrainStep.run, 0

    def wrapped(self: TrainStep, *args: Any, **kwargs: Any) -> StepMetrics:
        nonlocal taken
        taken += 1
        _meet(before.get(taken))
        metrics = step(self, *args, **kwargs)
        _meet(after.get(taken))
        return metrics

    TrainStep.run = wrapped  # type: ignore[method-assign]


def _meet(act: Callable[[], None] | None) -> None:
    if act is not None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        act()


def run_script(script: Path, flags: Sequence[str]) -> None:
    """Run the script in this process, as if it had been started with these flags."""
    sys.argv = [str(script), *flags]
    runpy.run_path(os.fspath(script), run_name="__main__")
