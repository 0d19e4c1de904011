"""The picture of a run: loss and gradient norm over iterations, as a PNG; needs the package matplotlib."""

from __future__ import annotations

import json
import os
from pathlib import Path

from matplotlib.figure import Figure

from megatron.core.dist_checkpointing.folder import naming
from megatron.training.observe.run_folder import METRICS_FILE, PICTURE_FILE
from megatron.training.observe.step_record import EvalSplit, StepMetrics


def read_metrics(file: Path) -> tuple[list[dict], list[dict]]:
    """Training and validation records of a metrics.jsonl, in file order."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return [r for r in records if r["kind"] == "train"], [r for r in records if r["kind"] == "valid"]


def draw_curves(runs: dict[str, Path], out: Path, title: str) -> None:
    """Draw loss (training and validation) and gradient norm of each run's metrics.jsonl into ``out``.

    ``runs`` maps legend names to files; later runs are drawn thinner, so that identical curves stay visible.
    """
    figure = Figure(figsize=(9, 7))
    loss_axes, norm_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, (name, file) in enumerate(runs.items()):
        train, valid = read_metrics(file)
        style = {"linewidth": max(0.8, 4.0 - 1.6 * number), "alpha": 0.45 + 0.5 * (number > 0)}
        steps = [r["iteration"] for r in train]
        loss_axes.plot(steps, [r["losses"]["lm loss"] for r in train], label=name, **style)
        norm_axes.plot(steps, [r["grad_norm"] for r in train], label=name, **style)
        if valid:
            loss_axes.plot(
                [r["iteration"] for r in valid],
                [r["losses"]["lm loss"] for r in valid],
                "o",
                label=f"{name}, validation",
            )
    loss_axes.set(ylabel="loss (nats a token)", title=title)
    norm_axes.set(ylabel="gradient norm", xlabel="iteration", yscale="log")
    loss_axes.legend()
    for axes in (loss_axes, norm_axes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    with naming(out):
        figure.savefig(out, dpi=110)


class CurvesPicture:
    """Draws ``curves.png`` beside ``metrics.jsonl`` when the run ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_evaluation``."""

    def close(self) -> None:
        """Draw, if there was a step."""
        metrics = self._folder / METRICS_FILE
        if metrics.stat().st_size:
            # Whatever bytes a folder's name has, and without formulas between dollars.
            name = os.fsencode(self._folder.resolve().name).decode("utf-8", "replace").replace("$", r"\$")
            draw_curves({name: metrics}, self._folder / PICTURE_FILE, f"Training run {name}")
