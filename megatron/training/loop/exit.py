"""When a run stops before its last iteration."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron.core.process_groups.collectives import maximum
from megatron.core.process_groups.groups import ProcessGroups
from megatron.training.config.training import TrainingConfig


class ExitRule:
    """Asked after every iteration; all ranks get the same answer.

    ``started`` is the monotonic time the run began at, in seconds.
    """

    def __init__(self, training: TrainingConfig, started: float) -> None:
        self._interval, self._started = training.exit_interval, started
        self._limit_min = training.exit_duration_in_mins
        self._signal = training.exit_signal if training.exit_signal_handler else None
        self._received = False
        if self._signal is not None:
            signal.signal(getattr(signal, self._signal), self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def reason_after(self, iteration: int, groups: ProcessGroups) -> str | None:
        """How the last line of the log ends ("at iteration 4"), or ``None`` to go on. Clocks and signals differ between
        ranks, so a time limit is reached, and a signal received, when the first of them says so."""
        if self._signal is not None:
            received = torch.tensor(int(self._received), dtype=torch.int64, device=groups.device)
            if int(maximum(groups.world, received)):
                return f"after receiving {self._signal}."
        if self._limit_min is not None:
            minutes = (time.monotonic() - self._started) / 60.0
            over = torch.tensor(int(minutes > self._limit_min), dtype=torch.int64, device=groups.device)
            if int(maximum(groups.world, over)):
                return f"after {minutes:.1f} minutes"
        if self._interval and iteration % self._interval == 0:
            return f"at iteration {iteration}"
        return None
