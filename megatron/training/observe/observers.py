"""Who is told about every step: the log line, metrics.jsonl, TensorBoard, the progress bar."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from megatron.training.observe.log_line import LogLineFormat, training_line, validation_block
from megatron.training.observe.step_record import StepMetrics


class Observer(Protocol):
    """Something that follows a run. Called on one rank only; must not touch training state."""

    def on_step(self, step: StepMetrics) -> None:
        """After each optimizer step."""
        ...

    def on_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """After each evaluation."""
        ...

    def close(self) -> None:
        """At the end of the run, also after an error."""
        ...


class LogLines:
    """Prints Megatron's log line after the first step and every ``interval`` steps."""

    def __init__(self, shape: LogLineFormat, interval: int, out: TextIO = sys.stdout) -> None:
        self._shape, self._interval, self._out = shape, interval, out
        self._window: list[StepMetrics] = []

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        self._window.append(step)
        if step.iteration == 1 or step.iteration % self._interval == 0:
            print(training_line(self._window, self._shape), file=self._out, flush=True)
            self._window.clear()

    def on_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_validation``."""
        print(validation_block(f"iteration {iteration}", losses), file=self._out, flush=True)

    def close(self) -> None:
        """As ``Observer.close``."""


class MetricsFile:
    """Appends one JSON object a step (and a validation) to ``metrics.jsonl``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        self._write({"kind": "train", **step.to_json()})

    def on_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_validation``."""
        self._write({"kind": "valid", "iteration": iteration, "consumed_samples": consumed_samples, "losses": losses})

    def _write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """As ``Observer.close``."""
        self._file.close()


class TensorBoard:
    """Megatron's scalar names, each with its twin over consumed samples."""

    def __init__(self, folder: Path, interval: int) -> None:
        self._writer, self._interval = SummaryWriter(str(folder)), interval

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        if step.iteration % self._interval:
            return
        scalars: dict[str, float] = {
            "learning-rate": step.learning_rate,
            "batch-size": step.global_batch_size,
            **step.losses,
            "loss-scale": 1.0,
            "grad-norm": step.grad_norm,
        }
        if step.num_zeros is not None:
            scalars["num-zeros"] = step.num_zeros
        if step.params_norm is not None:
            scalars["params-norm"] = step.params_norm
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step.iteration)
            self._writer.add_scalar(f"{name} vs samples", value, step.consumed_samples)
        self._writer.add_scalar("iteration-time", step.elapsed_s, step.iteration)

    def on_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_validation``."""
        for name, value in losses.items():
            self._writer.add_scalar(f"{name} validation", value, iteration)
            self._writer.add_scalar(f"{name} validation vs samples", value, consumed_samples)

    def close(self) -> None:
        """As ``Observer.close``."""
        self._writer.close()


class ProgressBar:
    """A bar on standard error; build it only where that is a terminal."""

    def __init__(self, total: int, start: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("training", total=total, completed=start, loss=float("nan"))
        self._progress.start()

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        self._progress.update(self._task, completed=step.iteration, loss=step.losses["lm loss"])

    def on_validation(self, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_validation``."""

    def close(self) -> None:
        """As ``Observer.close``."""
        self._progress.stop()
