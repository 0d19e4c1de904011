"""A profiled step leaves a summary and a trace; others leave nothing. Without a GPU its figures are null."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from megatron.training.config.profile import ProfileConfig
from megatron.training.observe.step_profile import StepProfiler, profile_file

CPU = torch.device("cpu")
WANTED = ProfileConfig(
    profile=True, use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4, profile_ranks=(1,)
)


def run(folder: Path, config: ProfileConfig, rank: int, iterations: int) -> None:
    profiler = StepProfiler(config, str(folder), rank, CPU)
    for iteration in range(1, iterations + 1):
        with profiler.step(iteration):
            torch.ones(3).add_(iteration)
    profiler.close()


def test_steps_of_the_window_on_the_chosen_rank(tmp_path: Path):
    run(tmp_path, WANTED, 1, 5)
    facts = json.loads((tmp_path / profile_file(1)).read_text())
    assert facts["iterations"] == [2, 3]
    assert facts["wall_s"] > 0
    assert facts["peak_host_memory_bytes"] > 1 << 20
    assert facts["gpu"] is None and facts["peak_memory_bytes"] is None
    with gzip.open(tmp_path / "profile_rank_00001.trace.json.gz", "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::add_") == 2


def test_run_that_ends_early_leaves_what_there_is(tmp_path: Path):
    run(tmp_path, WANTED, 1, 2)
    assert json.loads((tmp_path / profile_file(1)).read_text())["iterations"] == [2]


def test_nothing_elsewhere(tmp_path: Path):
    run(tmp_path, WANTED, 0, 5)
    run(tmp_path, ProfileConfig(profile_ranks=(1,)), 1, 20)
    run(tmp_path, WANTED, 1, 1)
    assert list(tmp_path.iterdir()) == []
