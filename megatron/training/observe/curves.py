"""The picture of a run: loss and gradient norm over iterations, as a PNG; needs the package matplotlib."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megatron.core.dist_checkpointing.folder import naming
from megatron.training.observe.run_folder import METRICS_FILE, PICTURE_FILE
from megatron.training.observe.step_record import EvalSplit, StepMetrics


def read_metrics(file: Path) -> tuple[list[dict], list[dict]]:
    """Training and validation records of a metrics.jsonl, in file order."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return [r for r in records if r["kind"] == "train"], [r for r in records if r["kind"] == "valid"]


def draw_curves(runs: Mapping[str, Sequence[Path]], out: Path, title: str) -> None:
    """Draw loss (training and validation) and gradient norm of each run's metrics.jsonl into ``out``.

    ``runs`` maps names to the files of the launches of a run. Launches of a run whose curves are identical are one
    line, and the legend says so; later lines are drawn thinner, so that those below stay visible.
    """
    figure = Figure(figsize=(9, 7), layout="constrained")
    loss_axes, norm_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    norms: list[float] = []
    drawn, validated = [], []
    different = [found for name, files in runs.items() for found in different_curves(name, files)]
    for number, (name, train, valid) in enumerate(different):
        wide = number == 0 and len(different) > 1
        style: dict[str, Any] = {"linewidth": 5.0 if wide else 1.5, "alpha": 0.45 if wide else 0.95}
        steps = [r["iteration"] for r in train]
        (line,) = loss_axes.plot(steps, [r["losses"]["lm loss"] for r in train], label=name, **style)
        drawn.append(line)
        norms += [r["grad_norm"] for r in train]
        norm_axes.plot(steps, norms[len(norms) - len(train) :], **style)
        if valid:
            style |= {"color": line.get_color(), "markersize": 10 if wide else 5, "label": "validation"}
            losses = [r["losses"]["lm loss"] for r in valid]
            validated = loss_axes.plot([r["iteration"] for r in valid], losses, "o", **style)
    loss_axes.set(ylabel="loss (nats a token)", title=title)
    norm_axes.set(ylabel="gradient norm", xlabel="iteration")
    norm_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _scale_norms(norm_axes, norms)
    figure.legend(handles=drawn + validated, loc="outside lower center", ncols=3)
    for axes in (loss_axes, norm_axes):
        axes.grid(alpha=0.3)
    with naming(out):
        figure.savefig(out, dpi=110)


def different_curves(name: str, files: Sequence[Path]) -> list[tuple[str, list[dict], list[dict]]]:
    """The curves that differ among the launches of a run: what to call them, training and validation records."""
    curves: dict[str, tuple[list[dict], list[dict]]] = {}
    launches: dict[str, list[str]] = {}
    for number, file in enumerate(files, 1):
        train, valid = read_metrics(file)
        # As text, where nan equals nan.
        points = str([(r["kind"], r["iteration"], r["losses"]["lm loss"], r.get("grad_norm")) for r in train + valid])
        curves[points] = train, valid
        launches.setdefault(points, []).append(str(number))
    found = []
    for points, same in launches.items():
        said = f", launch{'es' * (len(same) > 1)} {', '.join(same)}{' (identical)' * (len(same) > 1)}"
        if len(same) == len(files):
            said = f": {len(files)} launches, identical" if len(files) > 1 else ""
        found.append((name + said, *curves[points]))
    return found


def _scale_norms(axes: Axes, norms: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers where the norms are so far apart that it gets two of them at least."""
    positive = [norm for norm in norms if 0 < norm < math.inf]
    if positive and max(positive) >= 5 * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


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
            draw_curves({name: [metrics]}, self._folder / PICTURE_FILE, f"Training run {name}")
