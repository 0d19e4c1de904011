"""Every flag of Megatron-LM's is known: taken, taken without effect, taken with one value, or refused with a reason."""

from __future__ import annotations

import pytest

from megatron.core.config.fields import flags_of
from megatron.core.config.optimizer import DistributedDataParallelConfig, OptimizerConfig, SchedulerConfig
from megatron.training.cli.parser import our_flags, parse
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.legacy_table import MEGATRON_FLAGS
from megatron.training.config.legacy_values import REFUSED_VALUES, RefusedValues
from tests.architecture.sources import ROOT

NAMES = (ROOT / "tests/golden/megatron_flags.txt").read_text("utf-8").split()
VALUES = {"0": [], "1": ["1"], "+": ["1"], "*": []}


def is_known(name: str) -> bool:
    return name in our_flags() or MEGATRON_FLAGS.find(name) is not None


def test_no_flag_is_unknown() -> None:
    assert len(NAMES) == len(set(NAMES)) > 400
    assert [name for name in NAMES if not is_known(name)] == []
    assert not is_known("--no-such-flag")


def test_table_says_nothing_about_flags_that_are_settings() -> None:
    """A flag that was taken over leaves the table, or it would be listed twice."""
    assert [name for name in our_flags() if MEGATRON_FLAGS.find(name) is not None] == []


@pytest.mark.parametrize("cls", [OptimizerConfig, SchedulerConfig, DistributedDataParallelConfig, CheckpointConfig])
def test_groups_taken_over_whole_are_filed_as_megatrons(cls: type) -> None:
    ours = [flag.spellings[0] for flag in flags_of(cls) if not set(flag.spellings) & set(NAMES)]
    assert ours == (["--new-logical-layout"] if cls is CheckpointConfig else [])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in our_flags()])
def test_flag_that_is_no_setting_is_answered_once(name: str) -> None:
    """One warning, one refusal, or silence where the value is the only one."""
    legacy = MEGATRON_FLAGS.find(name)
    values = list(legacy.accepted[0].split()) if legacy.accepted else VALUES[legacy.arity]
    parsed = parse([name.replace("*", "x"), *values])
    answers = [*parsed.notes, *(str(problem) for problem in parsed.problems)]
    if legacy.kind == "only":
        assert answers == []
    else:
        assert len(answers) == (1 if legacy.unless is None else 2)
        assert legacy.reason in answers[0]


@pytest.mark.parametrize("entry", REFUSED_VALUES, ids=lambda entry: entry.flag)
def test_a_value_that_is_refused_has_a_reason(entry: RefusedValues) -> None:
    for value in entry.values.split():
        (problem,) = parse([entry.flag, value]).problems
        assert problem.given == f"{entry.flag} {value}"
        assert problem.needed.startswith(("one of ", "torch_dist, the only value taken; "))
        assert problem.needed.endswith(entry.reason)
    (problem,) = parse([entry.flag, "no-such-value"]).problems
    assert entry.reason not in problem.needed
