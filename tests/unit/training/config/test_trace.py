"""The flags of traces: their forms, and none of them without a folder."""

from __future__ import annotations

import pytest

from megatron.training.config.trace import TraceConfig, trace_problems


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"trace_level": "op"}, "--trace-level op"),
        ({"trace_iterations": "1:2"}, "--trace-iterations 1:2"),
        ({"trace_ranks": "0"}, "--trace-ranks 0"),
        ({"trace_dump": "decoder"}, "--trace-dump decoder"),
    ],
)
def test_a_flag_without_a_folder_is_refused(settings: dict[str, str], flag: str) -> None:
    (problem,) = trace_problems(TraceConfig(**settings), 1)
    assert problem.given == f"{flag} without --trace-dir"
    assert trace_problems(TraceConfig(trace_dir="x", **settings), 1) == []


@pytest.mark.parametrize(("iterations", "ranks"), [("2:1", "0"), ("0", "0"), ("x", "0"), ("1", "2"), ("1", "a")])
def test_windows_and_ranks_that_are_none(iterations: str, ranks: str) -> None:
    (problem,) = trace_problems(TraceConfig(trace_dir="x", trace_iterations=iterations, trace_ranks=ranks), 2)
    assert "--trace-iterations" in problem.change or "--trace-ranks" in problem.change
