"""Every rule a configuration must keep, and every breach reported at once."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.config.errors import ConfigError, Problem
from megatron.training.config.bounds import flag_of, missing_problems, range_problems, with_defaults
from megatron.training.config.layout_rules import layout_problems
from megatron.training.config.model_rules import model_problems
from megatron.training.config.profile import profile_problems
from megatron.training.config.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.config.trace import trace_problems
from megatron.training.config.training_rules import training_problems


def config_problems(given: RunConfig, world_size: int) -> list[Problem]:
    """What is wrong with the settings ``given`` (before ``resolve``) in a run of ``world_size`` processes.

    Rules over several settings divide by them, so they see a value that is out of its own range as not given, and what
    they would say about it is left out.
    """
    wrong = range_problems(given)
    usable = with_defaults(given, wrong)
    config = resolve(usable, world_size)
    rules = [
        *missing_problems(given),
        *model_problems(config.model),
        *layout_problems(config, world_size),
        *training_problems(usable, config),
        *trace_problems(given.trace, world_size),
        *profile_problems(given.profile, given.logging.run_dir, world_size),
    ]
    doubtful = [flag_of(given, group, name) for group, name in wrong]
    return [*wrong.values(), *dict.fromkeys(without_repeats(rules, doubtful))]


def resolve_and_validate(given: RunConfig, world_size: int) -> RunConfig:
    """The settings in effect.

    Raises:
        ConfigError: every problem at once.
    """
    problems = config_problems(given, world_size)
    if problems:
        raise ConfigError(problems)
    return resolve(given, world_size)


def without_repeats(problems: Iterable[Problem], doubtful: Iterable[str]) -> list[Problem]:
    """The problems that do not merely follow from a flag whose value could not be read.

    ``doubtful`` are spellings of such flags; a problem that names one of them is left out.
    """
    words = frozenset(doubtful)
    return [p for p in problems if not words & _flags_in(p)]


def _flags_in(problem: Problem) -> set[str]:
    text = f"{problem.given} {problem.needed} {problem.change}"
    return {word.strip("(),:;'\"") for word in text.split() if "--" in word}
