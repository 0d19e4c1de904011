"""What a run records for megatron-determinism trace-compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.errors import Problem
from megatron.core.config.fields import operational


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Streams of events with digests, to find where two runs part."""

    trace_dir: str | None = operational(None)
    """Folder for manifest.json and one stream of events per rank; none when not given."""
    trace_level: Literal["semantic", "module", "op", "kernel"] = operational("module")
    """semantic: collectives, sums, state and optimizer stages; module: also inputs, outputs and gradients of modules;
    op: also every ATen operation; kernel: also every op of the catalog with its variant and configuration."""
    trace_iterations: str | None = operational(None)
    """Iterations to trace as A:B, both included, or one number; all when not given."""
    trace_ranks: str = operational("all")
    """Ranks to trace: all, or numbers separated by commas."""
    trace_dump: str | None = operational(None)
    """Beginning of the scopes (module path, then a colon and the operation) whose arguments and results are kept as
    files in the trace folder, up to 256 MB a rank; none when not given."""


def traced_iterations(config: TraceConfig) -> tuple[int, int | None]:
    """First and last traced iteration; ``None``: to the end.

    Raises:
        ValueError: --trace-iterations is neither a number nor A:B with 1 <= A <= B.
    """
    if config.trace_iterations is None:
        return 1, None
    first, colon, last = config.trace_iterations.partition(":")
    window = int(first), int(last if colon else first)
    if not 1 <= window[0] <= window[1]:
        raise ValueError(config.trace_iterations)
    return window


def traced_ranks(config: TraceConfig, world_size: int) -> Sequence[int]:
    """Ranks to trace, ascending.

    Raises:
        ValueError: --trace-ranks names no rank of the world.
    """
    if config.trace_ranks == "all":
        return range(world_size)
    ranks = sorted({int(word) for word in config.trace_ranks.split(",")})
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(config.trace_ranks)
    return ranks


def trace_problems(config: TraceConfig, world_size: int) -> list[Problem]:
    """What is wrong with the trace flags."""
    problems = []
    plain = TraceConfig()
    for name in ("trace_level", "trace_iterations", "trace_ranks", "trace_dump"):
        value, flag = getattr(config, name), "--" + name.replace("_", "-")
        if config.trace_dir is None and value != getattr(plain, name):
            problems.append(Problem(f"{flag} {value} without --trace-dir", "a folder to trace into", "add --trace-dir"))
    try:
        traced_iterations(config)
    except ValueError:
        given = f"--trace-iterations {config.trace_iterations}"
        problems.append(Problem(given, "A:B with 1 <= A <= B, or one iteration", "--trace-iterations"))
    try:
        traced_ranks(config, world_size)
    except ValueError:
        given = f"--trace-ranks {config.trace_ranks}"
        problems.append(Problem(given, f"all, or ranks from 0 to {world_size - 1} with commas", "--trace-ranks"))
    return problems
