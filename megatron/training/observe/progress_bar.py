"""The progress bar of a run on a terminal; needs the package rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.training.observe.step_record import EvalSplit, StepMetrics


class ProgressBar:
    """A bar on standard error."""

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

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_evaluation``."""

    def close(self) -> None:
        """As ``Observer.close``."""
        self._progress.stop()
