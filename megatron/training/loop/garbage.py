"""When Python collects garbage: at fixed iterations, so that no rank pauses while the others wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.training.config.training import TrainingConfig


class GarbageControl:
    """With ``manual_gc`` Python's own collection is off from now until ``release``; without it nothing changes."""

    def __init__(self, training: TrainingConfig) -> None:
        self._on, self._interval = training.manual_gc, training.manual_gc_interval
        self._around_evaluation = training.manual_gc_eval
        self._was_enabled = gc.isenabled()
        if self._on:
            gc.disable()
            gc.collect()

    def after_step(self, iteration: int) -> None:
        """Collect if it is due."""
        if self._on and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect before and after, where asked for; what an evaluation leaves behind is another kind of garbage."""
        collects = self._on and self._around_evaluation
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect()

    def release(self) -> None:
        """Let Python collect again as it did before."""
        if self._on and self._was_enabled:
            gc.enable()
