"""Flags of profiling: what does not go together is refused."""

from __future__ import annotations

import pytest

from megatron.training.cli.parser import parse_run_config
from megatron.training.config.profile import profile_problems
from megatron.training.config.validate import config_problems
from tests.support.settings import SMALL


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", None),
        ("--profile-step-start 9 --profile-step-end 2", None),
        ("--profile --use-pytorch-profiler --run-dir r --profile-ranks 0 1", None),
        ("--use-pytorch-profiler", "--use-pytorch-profiler without --profile"),
        ("--profile --run-dir r", "--profile alone"),
        ("--profile --use-pytorch-profiler", "--profile without --run-dir"),
        ("--profile --use-pytorch-profiler --run-dir r --profile-step-start 12", "1 <= start < end"),
        ("--profile --use-pytorch-profiler --run-dir r --profile-step-start 0", "1 <= start < end"),
        ("--profile --use-pytorch-profiler --run-dir r --profile-ranks 2", "ranks from 0 to 1"),
    ],
)
def test_problems(words: str, problem: str | None):
    config = parse_run_config(words.split())
    found = [str(p) for p in profile_problems(config.profile, config.logging.run_dir, world_size=2)]
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_the_rules_of_a_run_ask():
    config = parse_run_config([*SMALL, "--profile"])
    assert any("--profile alone" in str(problem) for problem in config_problems(config, 1))
