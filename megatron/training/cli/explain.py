"""Words for what is wrong with a command line: the nearest names of a misspelt flag, the shape of a value."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence

from megatron.core.config.errors import Problem
from megatron.core.config.fields import Flag
from megatron.core.config.numbers import REAL_NUMBER, WHOLE_NUMBER, shortened

_MAX_NAMES = 3
_MIN_LIKENESS = 0.7
HABITS = {
    "--bf16": "--amp --dtype --precision",
    "--clip-grad": "--grad-clip --grad-norm-clip --gradient-clipping --max-grad-norm",
    "--data-path": "--data --data-dir --dataset",
    "--eval-interval": "--eval-every --eval-freq --eval-steps",
    "--ffn-hidden-size": "--ffn-dim --intermediate-size",
    "--global-batch-size": "--gbs --grad-accum --gradient-accumulation-steps --train-batch-size",
    "--hidden-size": "--d-model --dim --hidden-dim --n-embd",
    "--load": "--load-dir --resume --resume-from --resume-from-checkpoint",
    "--log-interval": "--log-every --log-freq --log-steps --logging-steps",
    "--lr": "--learning-rate",
    "--lr-decay-style": "--lr-schedule --lr-scheduler --lr-scheduler-type",
    "--lr-warmup-iters": "--warmup-iters --warmup-steps",
    "--mamba-state-dim": "--d-state --state-dim --state-size",
    "--micro-batch-size": "--mbs --micro-batch",
    "--min-lr": "--min-learning-rate",
    "--moe-router-topk": "--moe-top-k --num-experts-per-tok --top-k --topk",
    "--num-attention-heads": "--heads --n-head --n-heads --num-heads",
    "--num-query-groups": "--kv-heads --num-key-value-heads --num-kv-heads",
    "--pipeline-model-parallel-size": "--pipeline-parallel-size --pp --pp-size",
    "--expert-model-parallel-size": "--ep --ep-size --expert-parallel-size",
    "--rotary-base": "--rope-base --rope-theta",
    "--save": "--checkpoint-dir --ckpt-dir --output-dir --save-dir",
    "--save-interval": "--save-every --save-freq --save-steps",
    "--seed": "--manual-seed --random-seed",
    "--seq-length": "--block-size --context-length --max-length --max-seq-len --sequence-length",
    "--tensor-model-parallel-size": "--tensor-parallel-size --tp --tp-size",
    "--tensorboard-dir": "--log-dir --logdir --logging-dir",
    "--train-iters": "--iterations --max-iters --max-steps --num-steps --steps --train-steps",
    "--weight-decay": "--wd",
}
"""Flags and what they are called elsewhere, which need not look like them."""
_FLAG_OF_HABIT = {habit: flag for flag, habits in HABITS.items() for habit in habits.split()}


def nearest_names(spelling: str, known: Sequence[str]) -> list[str]:
    """Up to three of the known flags that look like ``spelling``, the likeliest first.

    A flag that ``spelling`` abbreviates or spells with underscores counts as likely whatever its length; where
    ``HABITS`` knows what is meant, nothing else is.
    """
    dashed = spelling.replace("_", "-")
    if _FLAG_OF_HABIT.get(dashed) in known:
        return [_FLAG_OF_HABIT[dashed]]
    begins = [name for name in known if len(dashed) > 4 and name.startswith(dashed)]
    close = difflib.get_close_matches(dashed, known, n=_MAX_NAMES, cutoff=_MIN_LIKENESS)
    return list(dict.fromkeys([*begins, *close]))[:_MAX_NAMES]


def unknown_flag(spelling: str, values: Sequence[str], known: Sequence[str]) -> tuple[Problem, list[str]]:
    """The problem with a flag nobody knows and the values behind it, and the names it suggests."""
    names = nearest_names(spelling, known)
    change = f"did you mean {' or '.join(names)}?" if names else "--help lists every flag"
    given = " ".join([spelling, *map(shortened, values[:_MAX_NAMES]), *["..."] * (len(values) > _MAX_NAMES)])
    return Problem(given, "a flag that exists, spelt out in full", change), names


def value_shape(flag: Flag) -> str:
    """What a value of the flag looks like, as a phrase: "some text", "one of a, b", "a, the only value taken"."""
    if typing.get_origin(flag.inner) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(flag.inner)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else f"{choices[0]}, the only value taken"
    shapes = {int: WHOLE_NUMBER, float: REAL_NUMBER, str: "some text"}
    return shapes[flag.inner]


def missing_value(spelling: str, shape: str) -> Problem:
    """A flag stands there without the value it takes."""
    return Problem(
        f"{spelling} without a value", shape, f"{spelling} VALUE; a value that starts with -- as {spelling}=VALUE"
    )


def surplus_values(spelling: str, values: Sequence[str], takes: str) -> Problem:
    """Values stand behind a flag that takes none, or no more."""
    given = f"{_quoted(values)} after {spelling}"
    change = f"remove {_it(values)}, or quote a value with spaces"
    if re.match("-[a-zA-Z]", values[0]):
        change = f"-{values[0]} if that flag is meant; flags begin with two dashes"
    return Problem(given, f"{takes} for {spelling}", change)


def stray_values(values: Sequence[str]) -> Problem:
    """Words at the start of the command line belong to no flag."""
    change = f"name the flag, or remove {_it(values)}"
    return Problem(_quoted(values), "a flag (--name) before every value", change)


def _quoted(values: Sequence[str]) -> str:
    return " ".join(repr(value) for value in values)


def _it(values: Sequence[str]) -> str:
    return "it" if len(values) == 1 else "them"
