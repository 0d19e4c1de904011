"""Folders that a run is told to write to or read from: what can be seen of them before anything starts."""

from __future__ import annotations

from pathlib import Path

from megatron.core.config.errors import Problem
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.folder import MARKER_FILE
from megatron.training.config.run import RunConfig


def folder_problems(config: RunConfig) -> list[Problem]:
    """Paths that cannot be the folders they are named as; a folder that is not there yet is made later. ``--save`` is
    tried by all ranks together when the run is built."""
    named = {
        "--run-dir": config.logging.run_dir,
        "--tensorboard-dir": config.logging.tensorboard_dir,
        "--fingerprint-dir": config.fingerprint.fingerprint_dir,
        "--trace-dir": config.trace.trace_dir,
        "--load": config.checkpoint.load,
    }
    problems = []
    for flag, path in named.items():
        if path is not None and _is_no_folder(Path(path)):
            problems.append(Problem(f"{flag} {path}, which is a file or lies below one", "a folder", flag))
    return problems + _load_problems(config.checkpoint.load)


def _is_no_folder(path: Path) -> bool:
    """True where the nearest part of the path that exists is not a folder."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return not existing.is_dir()


def _load_problems(load: str | None) -> list[Problem]:
    """One checkpoint named where the folder of all of them is meant would silently mean "none yet"."""
    if load is None or not (Path(load) / FACTS_FILE).is_file() or (Path(load) / MARKER_FILE).exists():
        return []
    given, needed = f"--load {load}, which is itself one checkpoint", "the folder that holds the checkpoints"
    return [Problem(given, needed, f"--load {Path(load).parent}, and --ckpt-step to choose one")]
