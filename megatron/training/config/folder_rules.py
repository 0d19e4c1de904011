"""Folders and files that a run is told to write to or read from, and the packages that writing them takes: what can be
seen before anything starts."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.errors import Problem
from megatron.core.dist_checkpointing.facts import FACTS_FILE
from megatron.core.dist_checkpointing.folder import MARKER_FILE
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import TokenizerConfig
from megatron.training.config.run import RunConfig

_OF_LAST_RANK = ("--run-dir", "--tensorboard-dir")


def folder_problems(config: RunConfig, rank: int = 0, world_size: int = 1) -> list[Problem]:
    """Paths that cannot be the folders they are named as; a folder that is not there yet is made later. What only the
    last rank writes need not be writable for others; the first one looks at it too, as its list is to be complete."""
    looks = rank in (0, world_size - 1)
    written = _written(config)
    read = {"--load": config.checkpoint.load, "--pretrained-checkpoint": config.checkpoint.pretrained_checkpoint}
    problems = []
    for flag, path in {**written, **read}.items():
        write = flag in written and (looks or flag not in _OF_LAST_RANK)
        reason = None if path is None else unusable(path, write=write, try_it=looks)
        if reason is not None:
            needed = "a folder that can be written, or a new one" if flag in written else "a folder that can be read"
            change = f"{flag} to the name of another folder, or leave it out"
            problems.append(Problem(f"{flag} {path or repr(path)}, {reason}", needed, change, local=True))
    problems += _shared_problems(config)
    return problems + _tokenizer_problems(config.tokenizer) or _one_checkpoint_problems(config.checkpoint)


def _written(config: RunConfig) -> dict[str, str | None]:
    """The folders that a run writes into, by flag."""
    return {
        "--save": config.checkpoint.save,
        "--run-dir": config.logging.run_dir,
        "--tensorboard-dir": config.logging.tensorboard_dir,
        "--fingerprint-dir": config.fingerprint.fingerprint_dir,
        "--trace-dir": config.trace.trace_dir,
        "--data-cache-path": config.data.data_cache_path,
    }


def flag_of_written(config: RunConfig, name: str) -> str | None:
    """The flag that names the folder a file is written in, the innermost of several; ``None`` where none does."""
    folders = {flag: Path(folder).absolute() for flag, folder in _written(config).items() if folder}
    inside = [flag for flag, folder in folders.items() if Path(name).absolute().is_relative_to(folder)]
    return max(inside, key=lambda flag: len(folders[flag].parts), default=None)


def _shared_problems(config: RunConfig) -> Iterator[Problem]:
    """Two of the folders that get a ``manifest.json`` each are one: it would be written over."""
    named = {
        "--run-dir": config.logging.run_dir,
        "--fingerprint-dir": config.fingerprint.fingerprint_dir,
        "--trace-dir": config.trace.trace_dir,
    }
    places = [(flag, path, os.path.realpath(path)) for flag, path in named.items() if path]
    for (one, path, place), (other, _, there) in itertools.combinations(places, 2):
        if place == there:
            yield Problem(f"{one} and {other} {path}", "a folder each", f"{other}, for instance to a folder in {path}")


def _tokenizer_problems(config: TokenizerConfig) -> list[Problem]:
    """Files that are not there; what is in them shows when the tokenizer is made."""
    return [
        Problem(f"{flag} {path}, which is not there", "a file of the tokenizer", f"{flag} to its path", local=True)
        for flag, path in config.files().items()
        if not Path(path).exists()
    ]


def package_problems(config: RunConfig) -> list[Problem]:
    """Optional packages that a flag needs and that are not installed."""
    needs = {
        "--run-dir": (config.logging.run_dir, "matplotlib", "which draws its picture"),
        "--tensorboard-dir": (config.logging.tensorboard_dir, "tensorboard", "which writes its files"),
    }
    return [
        Problem(
            f"{flag} {folder}",
            f"the package {package}, {what}; it is not installed",
            f"pip install {package}, or leave out {flag}",
            local=True,
        )
        for flag, (folder, package, what) in needs.items()
        if folder is not None and importlib.util.find_spec(package) is None
    ]


def unusable(name: str, *, write: bool, try_it: bool = True) -> str | None:
    """Why a path is no folder to write into, or to read from, as "which is a file"; ``None`` where nothing speaks
    against it. A folder that is not there yet is taken.

    With ``try_it`` a file without a name is made and dropped where the folder is or would be: permissions do not tell
    of every place that cannot be written.
    """
    if not name:
        return "which is empty"
    path = Path(name)
    try:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    except OSError as error:
        return f"which cannot be looked at ({error.strerror})"
    if not existing.is_dir():
        return "which is a file" if existing == path else f"which lies below the file {existing}"
    if not os.access(existing, os.R_OK | os.X_OK | (os.W_OK if write else 0)):
        return f"where {existing} cannot be {'written' if write else 'read'}"
    try:
        with tempfile.TemporaryFile(dir=existing) if write and try_it else contextlib.nullcontext():
            return None
    except OSError as error:
        return f"where {existing} cannot be written ({error.strerror})"


def _one_checkpoint_problems(config: CheckpointConfig) -> list[Problem]:
    """One checkpoint named where the folder of all of them is meant would silently mean "none yet", and to save into it
    would damage it."""
    problems = []
    for flag, path, more in (("--load", config.load, ", and --ckpt-step to choose one"), ("--save", config.save, "")):
        if path is not None and (Path(path) / FACTS_FILE).is_file() and not (Path(path) / MARKER_FILE).exists():
            given, needed = f"{flag} {path}, which is itself one checkpoint", "the folder that holds the checkpoints"
            problems.append(Problem(given, needed, f"{flag} {Path(path).parent}{more}"))
    return problems
