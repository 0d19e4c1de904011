"""Which data sets the settings name, for which split, and whether they are there; known before anything starts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.datasets.blended import Blend, parse_blend
from megatron.core.datasets.indexed_dataset import missing_files
from megatron.core.datasets.splits import (
    DEFAULT_SPLIT,
    MOCK_SPLIT,
    SPLIT_NAMES,
    Bookends,
    parse_split,
    split_matrix,
)
from megatron.training.config.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class DataSources:
    """What the settings say about each split: its blend and its part of every member; ``None``: left out.

    ``split`` and ``matrix`` are there where one source is cut into three; ``flags`` names the flag that decides about
    each split.
    """

    blends: tuple[Blend | None, ...]
    bookends: tuple[Bookends | None, ...]
    split: str | None
    matrix: list[Bookends | None] | None
    flags: tuple[str, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every data set that some split reads, each once, in the order of first use."""
        return tuple(dict.fromkeys(prefix for blend in self.blends if blend is not None for prefix in blend.prefixes))


def data_sources(config: DataConfig) -> DataSources:
    """The blends behind the flags; reads the files of --data-args-path and --per-split-data-args-path.

    Raises:
        ConfigError: such a file is missing or not of its form, or a blend is not.
    """
    if config.mock_data:
        matrix = split_matrix(parse_split(MOCK_SPLIT))
        blend = Blend(prefixes=("",), weights=None)
        return DataSources(
            blends=(blend,) * 3, bookends=tuple(matrix), split=MOCK_SPLIT, matrix=matrix, flags=("--mock-data",) * 3
        )
    if config.data_path or config.data_args_path:
        flag = "--data-path" if config.data_path else "--data-args-path"
        split = config.split or DEFAULT_SPLIT
        matrix = split_matrix(parse_split(split))
        named = config.data_path or tuple(_read_argument(config.data_args_path, flag).split())
        if not named:
            needed = "prefixes of data sets, each behind its weight or all without"
            raise ConfigError([Problem(f"{flag} {config.data_args_path}, which is empty", needed, flag)])
        blend = parse_blend(named, flag)
        return DataSources(
            blends=(blend,) * 3, bookends=tuple(matrix), split=split, matrix=matrix, flags=("--split",) * 3
        )
    flags: tuple[str, ...] = tuple(f"--{name}-data-path" for name in SPLIT_NAMES)
    lists: tuple[Sequence[str] | None, ...] = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if config.per_split_data_args_path:
        flags = ("--per-split-data-args-path",) * 3
        lists = _read_per_split(config.per_split_data_args_path)
    blends = []
    for words, flag in zip(lists, flags, strict=True):
        blend_or_none = parse_blend(words, flag) if words else None
        if blend_or_none is not None and len(blend_or_none.prefixes) == 1:
            blend_or_none = Blend(prefixes=blend_or_none.prefixes, weights=None)
        blends.append(blend_or_none)
    return DataSources(blends=tuple(blends), bookends=((0.0, 1.0),) * 3, split=None, matrix=None, flags=flags)


def require_data_files(config: DataConfig) -> None:
    """Every data set that the settings name has both its files; what is in them is not looked at.

    Raises:
        ConfigError: see ``data_sources``.
        DamagedInputError: files are missing; names all of them and the flag.
    """
    if config.mock_data:
        return
    with naming_source(config):
        wrong = [words for prefix in data_sources(config).prefixes if (words := missing_files(prefix)) is not None]
        if wrong:
            raise DamagedInputError("; ".join(wrong))


@contextlib.contextmanager
def naming_source(config: DataConfig) -> Iterator[None]:
    """What is wrong with a data set is said with the flag that names it, also where it cannot be looked at."""
    try:
        yield
    except (DamagedInputError, OSError) as error:
        flags = " or ".join(config.given_sources())
        raise DamagedInputError(f"{error}; change {flags}, or make the data set again") from error


def _read_argument(path: str | None, flag: str) -> str:
    assert path is not None
    if not Path(path).is_file():
        raise ConfigError([Problem(f"{flag} {path}", "a file that exists", flag)])
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        given = f"{flag} {path}, which is not text (byte {error.start}: {error.reason})"
        raise ConfigError([Problem(given, "a text file in UTF-8", flag)]) from error


def _read_per_split(path: str) -> tuple[Sequence[str] | None, ...]:
    flag = "--per-split-data-args-path"
    needed = 'a JSON object with lists of words under "train", "valid" and "test"'
    text = _read_argument(path, flag)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(f"{flag} {path}, which is not JSON ({error})", needed, flag)]) from error
    if not isinstance(content, dict) or not set(content) <= set(SPLIT_NAMES):
        raise ConfigError([Problem(f"{flag} {path}", needed, flag)])
    lists = [content.get(name) for name in SPLIT_NAMES]
    if not all(words is None or isinstance(words, list) for words in lists):
        raise ConfigError([Problem(f"{flag} {path}", needed, flag)])
    return tuple(None if words is None else tuple(str(word) for word in words) for words in lists)
