"""Megatron's training and validation log lines."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.observe.step_record import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLineFormat:
    """What the line holds besides the fixed columns. ``flops_per_sample`` is ``None`` where throughput is not asked
    for; ``world_size`` divides it."""

    train_iters: int
    world_size: int
    flops_per_sample: float | None = None


def training_line(window: Sequence[StepMetrics], shape: LogLineFormat) -> str:
    """The line for the steps since the last one (not empty): losses and time are means over them, the rest is the
    last step's."""
    last = window[-1]
    elapsed_ms = 1000.0 * sum(step.elapsed_s for step in window) / len(window)
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [
        f" [{now}] iteration {last.iteration:8d}/{shape.train_iters:8d} |",
        f" consumed samples: {last.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {elapsed_ms:.1f} |",
    ]
    if shape.flops_per_sample is not None:
        flops = shape.flops_per_sample * last.global_batch_size
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {flops / (elapsed_ms * 1e9 * shape.world_size):.1f} |")
    parts.append(f" learning rate: {last.learning_rate:.6E} |")
    parts.append(f" global batch size: {last.global_batch_size:5d} |")
    for name in last.losses:
        parts.append(f" {name}: {sum(step.losses[name] for step in window) / len(window):.6E} |")
    parts.append(f" loss scale: {1.0:.1f} |")
    parts.append(f" grad norm: {last.grad_norm:.3f} |")
    if last.num_zeros is not None:
        parts.append(f" num zeros: {last.num_zeros} |")
    if last.params_norm is not None:
        parts.append(f" params norm: {last.params_norm:.3f} |")
    parts.append(f" number of skipped iterations: {0:3d} |")
    parts.append(f" number of nan iterations: {0:3d} |")
    return "".join(parts)


def validation_block(place: str, losses: dict[str, float]) -> str:
    """Megatron's ruled validation line; ``place`` is for instance ``iteration 10``. PPL is exp(min(20, loss))."""
    columns = "".join(
        f" {name} value: {value:.6E} | {name} PPL: {math.exp(min(20.0, value)):.6E} |" for name, value in losses.items()
    )
    line = f" validation loss at {place} |{columns} "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"
