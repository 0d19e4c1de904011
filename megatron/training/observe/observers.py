"""What follows a run step by step: the log line, metrics.jsonl and, where their packages are installed, TensorBoard, a
progress bar and the picture of the run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Protocol, TextIO

from megatron.core.dist_checkpointing.folder import naming
from megatron.training.config.training import LoggingConfig
from megatron.training.observe.log_line import LogLineFormat, training_line, validation_block
from megatron.training.observe.run_folder import METRICS_FILE
from megatron.training.observe.step_record import EvalSplit, StepMetrics


class Observer(Protocol):
    """Something that follows a run. Called on one rank only; must not touch training state."""

    def on_step(self, step: StepMetrics) -> None:
        """After each optimizer step."""
        ...

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """After each evaluation."""
        ...

    def close(self) -> None:
        """At the end of the run, also after an error."""
        ...


class LogLines:
    """Prints Megatron's log line after the first step of a launch and every ``interval`` steps; to standard output, as
    it is then, unless ``out`` is given."""

    def __init__(self, shape: LogLineFormat, interval: int, out: TextIO | None = None) -> None:
        self._shape, self._interval, self._out = shape, interval, out
        self._window: list[StepMetrics] = []
        self._first = True

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        self._window.append(step)
        if self._first or step.iteration % self._interval == 0:
            self._first = False
            print(training_line(self._window, self._shape), file=self._out, flush=True)
            self._window.clear()

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_evaluation``."""
        place = f"iteration {iteration}{' on test set' if split == 'test' else ''}"
        print(validation_block(place, losses), file=self._out, flush=True)

    def close(self) -> None:
        """As ``Observer.close``."""


class MetricsFile:
    """Appends one JSON object a step (and an evaluation) to ``metrics.jsonl`` of a folder that ``prepare_run_folder``
    has made ready."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._file = self._path.open("a", encoding="utf-8")

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        self._write({"kind": "train", **step.to_json()})

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_evaluation``."""
        self._write({"kind": split, "iteration": iteration, "consumed_samples": consumed_samples, "losses": losses})

    def _write(self, record: dict) -> None:
        with naming(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """As ``Observer.close``."""
        self._file.close()


def build_observers(logging: LoggingConfig, shape: LogLineFormat, start_iteration: int) -> list[Observer]:
    """The observers that the settings ask for; a progress bar where standard error is a terminal."""
    observers: list[Observer] = [LogLines(shape, logging.log_interval)]
    if logging.run_dir:
        from megatron.training.observe.curves import CurvesPicture

        # The picture is drawn from the file, so it is told to close after it.
        observers += [MetricsFile(Path(logging.run_dir)), CurvesPicture(Path(logging.run_dir))]
    if logging.tensorboard_dir:
        from megatron.training.observe.tensorboard import TensorBoard

        observers.append(TensorBoard(Path(logging.tensorboard_dir), logging.tensorboard_log_interval))
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from megatron.training.observe.progress_bar import ProgressBar

        observers.append(ProgressBar(shape.train_iters, start_iteration))
    return observers
