"""What tokenizers that are read from files share: the package behind them, the file, the size of the vocabulary."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem


def require_package(package: str, kind: str) -> None:
    """Refuse a tokenizer type whose library is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(package) is None:
        needed = f"the package {package}, which is not installed"
        problem = Problem(f"--tokenizer-type {kind}", needed, f"pip install {package}, or another --tokenizer-type")
        raise ConfigError([problem])


def require_file(path: str, flag: str, what: str) -> Path:
    """The file that a flag names.

    Raises:
        ConfigError: there is no such file.
    """
    if not Path(path).is_file():
        raise ConfigError([Problem(f"{flag} {path}", f"{what}; there is no file {path}", flag)])
    return Path(path)


def read_utf8(path: Path) -> str:
    """The text of a file.

    Raises:
        DamagedInputError: it is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedInputError(f"{path}: not UTF-8 at byte {error.start}") from error


def parse_json(path: Path, text: str) -> Any:
    """What the text of a file says.

    Raises:
        DamagedInputError: it is not JSON, or nested too deep or with numbers too long to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedInputError(f"{path}: not JSON: {error}") from error


def vocabulary_size(own: int, asked: int | None, path: Path) -> int:
    """``asked``, or the tokenizer's own size where nothing is asked.

    Raises:
        ConfigError: ``asked`` is smaller than the tokenizer's own.
    """
    if asked is not None and asked < own:
        needed = f"at least the {own} ids of the tokenizer in {path}"
        raise ConfigError([Problem(f"--vocab-size {asked}", needed, "leave out --vocab-size, or make it larger")])
    return own if asked is None else asked
