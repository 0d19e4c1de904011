"""Schedules against tables computed by hand, at their edges."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from megatron.core.config.optimizer import OptimizerConfig, SchedulerConfig
from megatron.core.optimizer.optimizer_param_scheduler import (
    SCHEDULE_FLAGS,
    Schedule,
    learning_rate,
    plan_schedule,
    weight_decay,
)

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.25, weight_decay=0.1)


def _schedule(**settings: object) -> Schedule:
    return plan_schedule(SchedulerConfig(**settings), OPTIMIZER, train_samples=80)


def test_lengths_are_samples_or_a_fraction_and_the_decay_ends_with_training_unless_given() -> None:
    given = _schedule(lr_warmup_samples=16, lr_decay_samples=72, lr_decay_style="WSD", lr_wsd_decay_samples=24)
    assert (given.warmup_samples, given.decay_samples, given.wsd_decay_samples) == (16, 72, 24)
    assert (given.wd_incr_samples, _schedule().decay_samples) == (80, 80)
    assert _schedule(lr_warmup_fraction=0.125).warmup_samples == 10.0


def test_every_number_of_a_schedule_has_its_flags() -> None:
    assert SCHEDULE_FLAGS.keys() == {field.name for field in fields(Schedule)}


def test_warmup_is_linear_from_its_start_and_includes_its_end() -> None:
    schedule = _schedule(lr_warmup_samples=16, lr_warmup_init=0.5)
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
    schedule = _schedule(lr_warmup_samples=16, lr_decay_style=style)
    assert [learning_rate(schedule, n) for n in (16, 32, 48, 80)] == values
    assert learning_rate(schedule, 81) == (1.0 if style == "constant" else 0.25)


def test_inverse_square_root_falls_from_the_warmup_on_and_not_below_the_least() -> None:
    schedule = _schedule(lr_warmup_samples=8, lr_decay_style="inverse-square-root")
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
    schedule = _schedule(lr_warmup_samples=8, lr_decay_style="WSD", lr_wsd_decay_samples=32, lr_wsd_decay_style=style)
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
