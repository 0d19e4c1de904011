"""Learning rate and weight decay as functions of the samples trained on so far; Python float64 throughout."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.config.errors import ConfigError, Problem
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


def plan_schedule(
    scheduler: SchedulerConfig,
    optimizer: OptimizerConfig,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> Schedule:
    """Turn settings counted in iterations, samples or fractions into samples.

    A run counted in iterations (``train_iters``) uses the ``*_iters`` settings times the global batch size, one
    counted in samples the ``*_samples`` settings.

    Raises:
        ConfigError: no learning rate or no length, a warm-up that is not shorter than the decay, WSD without its
            last phase, or a weight decay that changes without both ends. All problems at once.
    """
    if train_samples is not None:
        total = train_samples
        decay = total if scheduler.lr_decay_samples is None else scheduler.lr_decay_samples
        warmup: float = scheduler.lr_warmup_samples
        wsd = scheduler.lr_wsd_decay_samples
    else:
        total = (train_iters or 0) * global_batch_size
        decay = total if scheduler.lr_decay_iters is None else scheduler.lr_decay_iters * global_batch_size
        warmup = scheduler.lr_warmup_iters * global_batch_size
        wsd = None if scheduler.lr_wsd_decay_iters is None else scheduler.lr_wsd_decay_iters * global_batch_size
    if scheduler.lr_warmup_fraction is not None:
        warmup = scheduler.lr_warmup_fraction * decay
    start_wd, end_wd = scheduler.start_weight_decay, scheduler.end_weight_decay
    changes = scheduler.weight_decay_incr_style != "constant"
    problems = _problems(scheduler, optimizer, decay, warmup, wsd)
    if (changes and None in (start_wd, end_wd)) or (not changes and (start_wd, end_wd) != (None, None)):
        given = f"--weight-decay-incr-style {scheduler.weight_decay_incr_style}, start {start_wd}, end {end_wd}"
        rule = "linear or cosine with --start-weight-decay and --end-weight-decay, constant with neither"
        problems.append(Problem(given, rule, "--weight-decay-incr-style or the two ends"))
    if problems or optimizer.lr is None:
        raise ConfigError(problems)
    return Schedule(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup_init=scheduler.lr_warmup_init,
        warmup_samples=warmup,
        decay_style=scheduler.lr_decay_style,
        decay_samples=decay,
        wsd_decay_style=scheduler.lr_wsd_decay_style,
        wsd_decay_samples=wsd or 0,
        start_wd=optimizer.weight_decay if start_wd is None else start_wd,
        end_wd=optimizer.weight_decay if end_wd is None else end_wd,
        wd_incr_style=scheduler.weight_decay_incr_style,
        wd_incr_samples=total,
    )


def _problems(
    scheduler: SchedulerConfig, optimizer: OptimizerConfig, decay: int, warmup: float, wsd: int | None
) -> list[Problem]:
    problems = []
    if optimizer.lr is None or not optimizer.min_lr <= optimizer.lr or optimizer.min_lr < 0:
        given = f"--lr {optimizer.lr}, --min-lr {optimizer.min_lr}"
        problems.append(Problem(given, "0 <= min-lr <= lr", "--lr or --min-lr"))
    if optimizer.lr is not None and scheduler.lr_warmup_init > optimizer.lr:
        given = f"--lr-warmup-init {scheduler.lr_warmup_init}, --lr {optimizer.lr}"
        problems.append(Problem(given, "warm-up to start at or below --lr", "--lr-warmup-init"))
    if decay < 1 or not 0 <= warmup < decay:
        given = f"a warm-up of {warmup} samples and a decay that ends at {decay} samples"
        problems.append(Problem(given, "0 <= warm-up < decay", "the --lr-warmup-... or --lr-decay-... flag"))
    if scheduler.lr_decay_style == "WSD" and not wsd:
        rule = "WSD to have a last phase"
        problems.append(Problem("--lr-decay-style WSD alone", rule, "--lr-wsd-decay-iters or --lr-wsd-decay-samples"))
    return problems


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


class OptimizerParamScheduler:
    """A schedule and the position on it; ``num_steps`` counts samples, as Megatron's does.

    Use ``lr`` and ``weight_decay`` for the step, then ``step(samples)`` if the step was taken; a skipped one adds 0.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.schedule, self.num_steps)

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next step."""
        return weight_decay(self.schedule, self.num_steps)

    def step(self, increment: int) -> None:
        """Count the samples of a step that was taken."""
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        """Everything the curves depend on and the position."""
        return {**asdict(self.schedule), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the position of a run with the same schedule.

        Raises:
            ConfigError: the stored schedule is another one; names every value that differs.
        """
        mine = asdict(self.schedule)
        problems = [
            Problem(f"{name} {value!r}", f"{name} {state.get(name)!r}, as stored", f"the flag behind {name}")
            for name, value in mine.items()
            if state.get(name) != value
        ]
        if problems:
            raise ConfigError(problems)
        self.num_steps = int(state["num_steps"])
