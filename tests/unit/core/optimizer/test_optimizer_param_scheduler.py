"""Schedules against tables computed by hand, at their edges, and the state that goes into a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.optimizer import OptimizerConfig, SchedulerConfig
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    Schedule,
    learning_rate,
    plan_schedule,
    weight_decay,
)

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.25, weight_decay=0.1)


def _schedule(**settings: object) -> Schedule:
    return plan_schedule(SchedulerConfig(**settings), OPTIMIZER, global_batch_size=8, train_iters=10)


def test_lengths_count_samples_from_iterations_samples_or_fraction() -> None:
    by_iters = _schedule(lr_warmup_iters=2, lr_decay_iters=9, lr_decay_style="WSD", lr_wsd_decay_iters=3)
    assert (by_iters.warmup_samples, by_iters.decay_samples, by_iters.wsd_decay_samples) == (16, 72, 24)
    assert by_iters.wd_incr_samples == 80
    assert _schedule(lr_warmup_fraction=0.125).warmup_samples == 10.0
    settings = SchedulerConfig(lr_warmup_samples=30, lr_decay_style="WSD", lr_wsd_decay_samples=50)
    by_samples = plan_schedule(settings, OPTIMIZER, global_batch_size=8, train_samples=1000)
    assert (by_samples.warmup_samples, by_samples.decay_samples, by_samples.wsd_decay_samples) == (30, 1000, 50)


def test_warmup_is_linear_from_its_start_and_includes_its_end() -> None:
    schedule = _schedule(lr_warmup_iters=2, lr_warmup_init=0.5)
    assert [learning_rate(schedule, n) for n in (0, 4, 8, 16)] == [0.5, 0.625, 0.75, 1.0]


@pytest.mark.parametrize(
    ("style", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.8125, 0.625, 0.25]),
        (
            "cosine",
            [1.0, 0.25 + 0.75 * 0.5 * (math.cos(math.pi * 0.25) + 1), 0.25 + 0.375 * (math.cos(math.pi / 2) + 1), 0.25],
        ),
    ],
)
def test_decay_between_warmup_and_end(style: str, values: list[float]) -> None:
    schedule = _schedule(lr_warmup_iters=2, lr_decay_style=style)
    assert [learning_rate(schedule, n) for n in (16, 32, 48, 80)] == values
    assert learning_rate(schedule, 81) == (1.0 if style == "constant" else 0.25)


def test_inverse_square_root_falls_from_the_warmup_on_and_not_below_the_least() -> None:
    schedule = _schedule(lr_warmup_iters=1, lr_decay_style="inverse-square-root")
    assert [learning_rate(schedule, n) for n in (4, 8, 32, 72)] == [0.5, 1.0, 0.5, math.sqrt(8) / math.sqrt(72)]
    low = replace(schedule, min_lr=0.6)
    assert [learning_rate(low, n) for n in (8, 18, 32, 80, 81)] == [1.0, math.sqrt(8) / math.sqrt(18), 0.6, 0.6, 0.6]
    at_once = _schedule(lr_decay_style="inverse-square-root")
    assert [learning_rate(at_once, n) for n in (0, 1, 4, 16)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("style", "quarter"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (math.cos(math.pi * 0.25) + 1.0)),
        ("exponential", 2.0 * 0.5**0.25 - 1.0),
        ("minus_sqrt", 0.5),
    ],
)
def test_wsd_is_constant_until_its_last_phase(style: str, quarter: float) -> None:
    schedule = _schedule(lr_warmup_iters=1, lr_decay_style="WSD", lr_wsd_decay_iters=4, lr_wsd_decay_style=style)
    assert [learning_rate(schedule, n) for n in (8, 40, 48)] == [1.0, 1.0, 1.0]
    assert learning_rate(schedule, 56) == 0.25 + quarter * 0.75
    assert learning_rate(schedule, 80) == pytest.approx(0.25, abs=1e-15)
    assert learning_rate(schedule, 88) == 0.25


@pytest.mark.parametrize(("style", "middle"), [("linear", 0.5), ("cosine", 0.5 * (math.cos(math.pi * 0.5) + 1.0))])
def test_weight_decay_grows_to_its_end(style: str, middle: float) -> None:
    schedule = _schedule(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.2)
    assert weight_decay(schedule, 0) == pytest.approx(0.1, abs=1e-17)
    assert weight_decay(schedule, 40) == 0.1 + middle * (0.2 - 0.1)
    assert weight_decay(schedule, 81) == 0.2


def test_constant_weight_decay_is_the_optimizers() -> None:
    assert [weight_decay(_schedule(), n) for n in (0, 40, 100)] == [0.1, 0.1, 0.1]


def test_position_counts_samples_and_a_skipped_step_adds_none() -> None:
    scheduler = OptimizerParamScheduler(_schedule(lr_warmup_iters=2))
    used = []
    for increment in (8, 0, 8, 16):
        used.append(scheduler.lr)
        scheduler.step(increment)
    assert used == [0.0, 0.5, 0.5, 1.0]
    assert scheduler.num_steps == 32


def test_a_restored_position_continues_the_curve_and_another_curve_is_refused() -> None:
    one = OptimizerParamScheduler(_schedule(lr_decay_style="cosine"))
    one.step(24)
    two = OptimizerParamScheduler(_schedule(lr_decay_style="cosine"))
    two.load_state_dict(one.state_dict())
    assert (two.num_steps, two.lr, two.weight_decay) == (24, one.lr, one.weight_decay)
    other = OptimizerParamScheduler(replace(one.schedule, max_lr=2.0, decay_style="linear"))
    with pytest.raises(ConfigError, match="2 problems") as caught:
        other.load_state_dict(one.state_dict())
    assert "max_lr" in str(caught.value)
    assert other.num_steps == 0


@pytest.mark.parametrize(
    ("optimizer", "settings", "text"),
    [
        ({"lr": None}, {}, "0 <= min-lr <= lr"),
        ({"min_lr": 2.0}, {}, "0 <= min-lr <= lr"),
        ({}, {"lr_warmup_iters": 10}, "0 <= warm-up < decay"),
        ({}, {"lr_warmup_init": 3.0}, "--lr-warmup-init"),
        ({}, {"lr_decay_style": "WSD"}, "WSD to have a last phase"),
        ({}, {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({}, {"end_weight_decay": 0.1}, "--weight-decay-incr-style"),
    ],
)
def test_contradictions_are_refused(optimizer: dict, settings: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_schedule(SchedulerConfig(**settings), replace(OPTIMIZER, **optimizer), global_batch_size=8, train_iters=10)


def test_all_problems_are_reported_together() -> None:
    settings = SchedulerConfig(lr_decay_style="WSD", lr_warmup_iters=99)
    with pytest.raises(ConfigError, match="3 problems"):
        plan_schedule(settings, replace(OPTIMIZER, lr=None), global_batch_size=8, train_iters=10)
