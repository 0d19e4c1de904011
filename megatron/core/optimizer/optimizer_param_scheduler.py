"""Learning rate and weight decay as functions of the samples trained on so far; Python float64 throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.config.optimizer import OptimizerConfig, SchedulerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Every number the two curves depend on; lengths in samples.

    ``warmup_samples`` may be fractional (a fraction of the decay length), as in Megatron.
    """

    max_lr: float
    min_lr: float
    warmup_init: float
    warmup_samples: float
    decay_style: str
    decay_samples: int
    wsd_decay_style: str
    wsd_decay_samples: int
    start_wd: float
    end_wd: float
    wd_incr_style: str
    wd_incr_samples: int


SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_init": "--lr-warmup-init",
    "warmup_samples": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    "decay_style": "--lr-decay-style",
    "decay_samples": "--lr-decay-iters or --lr-decay-samples (not given: the length of training)",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "wsd_decay_samples": "--lr-wsd-decay-iters or --lr-wsd-decay-samples",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_samples": "--train-iters or --train-samples",
}
"""What decides each number of a schedule on the command line; those in samples count iterations times the batch."""


def plan_schedule(scheduler: SchedulerConfig, optimizer: OptimizerConfig, *, train_samples: int) -> Schedule:
    """The schedule of a run of ``train_samples`` samples; of the settings only lengths in samples are read.

    What the settings contradict each other in was refused before (``training/config/training_rules.py``).
    """
    decay = train_samples if scheduler.lr_decay_samples is None else scheduler.lr_decay_samples
    fraction = scheduler.lr_warmup_fraction
    start_wd, end_wd = scheduler.start_weight_decay, scheduler.end_weight_decay
    return Schedule(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup_init=scheduler.lr_warmup_init,
        warmup_samples=scheduler.lr_warmup_samples if fraction is None else fraction * decay,
        decay_style=scheduler.lr_decay_style,
        decay_samples=decay,
        wsd_decay_style=scheduler.lr_wsd_decay_style,
        wsd_decay_samples=scheduler.lr_wsd_decay_samples or 0,
        start_wd=optimizer.weight_decay if start_wd is None else start_wd,
        end_wd=optimizer.weight_decay if end_wd is None else end_wd,
        wd_incr_style=scheduler.weight_decay_incr_style,
        wd_incr_samples=train_samples,
    )


def learning_rate(schedule: Schedule, num_samples: int) -> float:
    """Learning rate of the step that starts after ``num_samples`` samples.

    Linear warm-up from ``warmup_init``; then constant, linear or cosine down to ``min_lr`` at the end of the decay;
    inverse-square-root: the peak times sqrt(warm-up / samples), at least ``min_lr``; or WSD: constant until its last
    phase, whose coefficient over that phase's progress r is 1 - r, the half cosine, 2 * 0.5**r - 1, or 1 - sqrt(r).
    ``min_lr`` after the end, except for constant.
    """
    if schedule.warmup_samples > 0 and num_samples <= schedule.warmup_samples:
        return schedule.warmup_init + (schedule.max_lr - schedule.warmup_init) * num_samples / schedule.warmup_samples
    if schedule.decay_style == "constant":
        return schedule.max_lr
    if num_samples > schedule.decay_samples:
        return schedule.min_lr
    if schedule.decay_style == "inverse-square-root":
        falling = math.sqrt(max(schedule.warmup_samples, 1)) / math.sqrt(max(num_samples, 1))
        return max(schedule.min_lr, schedule.max_lr * falling)
    ratio = (num_samples - schedule.warmup_samples) / (schedule.decay_samples - schedule.warmup_samples)
    if schedule.decay_style == "WSD":
        coefficient = _wsd_coefficient(schedule, num_samples)
    else:
        coefficient = {"linear": 1.0 - ratio, "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0)}[schedule.decay_style]
    return schedule.min_lr + coefficient * (schedule.max_lr - schedule.min_lr)


def _wsd_coefficient(schedule: Schedule, num_samples: int) -> float:
    start = schedule.decay_samples - schedule.wsd_decay_samples
    if num_samples <= start:
        return 1.0
    r = (num_samples - start) / schedule.wsd_decay_samples
    return {
        "linear": 1.0 - r,
        "cosine": 0.5 * (math.cos(math.pi * r) + 1.0),
        "exponential": 2.0 * 0.5**r - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(r),
    }[schedule.wsd_decay_style]


def weight_decay(schedule: Schedule, num_samples: int) -> float:
    """Weight decay of the step that starts after ``num_samples`` samples: from ``start_wd`` to ``end_wd`` over the
    training, constant, linear or along half a cosine."""
    if schedule.wd_incr_style == "constant" or num_samples > schedule.wd_incr_samples:
        return schedule.end_wd
    ratio = num_samples / schedule.wd_incr_samples
    coefficient = ratio if schedule.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
    return schedule.start_wd + coefficient * (schedule.end_wd - schedule.start_wd)
