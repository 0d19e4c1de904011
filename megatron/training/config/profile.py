"""Which steps of a run are profiled, and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.errors import Problem
from megatron.core.config.fields import operational


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """PyTorch's profiler around a few steps."""

    profile: bool = operational(False)
    """Profile some steps; needs --use-pytorch-profiler and --run-dir, where each profiled rank leaves
    profile_rank_N.json (time the GPU is busy, exposed communication, kernels by group, peak memory) and
    profile_rank_N.trace.json.gz."""
    use_pytorch_profiler: bool = operational(False)
    """Profile with PyTorch's profiler, the only one that is driven from inside."""
    profile_step_start: int = operational(10)
    """First iteration to profile."""
    profile_step_end: int = operational(12)
    """First iteration that is not profiled any more."""
    profile_ranks: tuple[int, ...] = operational((0,))
    """Ranks to profile."""


def profile_problems(config: ProfileConfig, run_dir: str | None, world_size: int) -> list[Problem]:
    """What is wrong with the flags of profiling."""
    if not config.profile:
        if not config.use_pytorch_profiler:
            return []
        return [Problem("--use-pytorch-profiler without --profile", "steps to profile", "add --profile")]
    problems = []
    if not config.use_pytorch_profiler:
        change = "add --use-pytorch-profiler; an outside profiler is wrapped around the command instead"
        problems.append(Problem("--profile alone", "the profiler that is driven from inside", change))
    if run_dir is None:
        problems.append(Problem("--profile without --run-dir", "a folder for what it finds", "add --run-dir DIR"))
    first, end = config.profile_step_start, config.profile_step_end
    if not 1 <= first < end:
        given = f"--profile-step-start {first} --profile-step-end {end}"
        problems.append(Problem(given, "1 <= start < end", "--profile-step-start, --profile-step-end"))
    if not all(0 <= rank < world_size for rank in config.profile_ranks):
        ranks, plural = " ".join(map(str, config.profile_ranks)), "es" * (world_size != 1)
        given = f"--profile-ranks {ranks} with {world_size} process{plural}"
        problems.append(Problem(given, f"ranks from 0 to {world_size - 1}", "--profile-ranks"))
    return problems
