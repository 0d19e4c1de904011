"""Errors a user can act on, and the exit code each one ends the process with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the configuration.

    ``given`` is what the user asked for, ``needed`` the rule it breaks with the numbers put in, ``change`` the flag
    to change and how. ``local``: it may be so on one machine of several.
    """

    given: str
    needed: str
    change: str
    local: bool = False

    def __str__(self) -> str:
        return f"given {self.given}; needed: {self.needed}; change: {self.change}"


class ConfigError(ValueError):
    """The configuration cannot run. Lists every problem found, not only the first. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  {i}. {p}" for i, p in enumerate(self.problems, 1)]
        count = len(self.problems)
        super().__init__(f"configuration refused, {count} problem{'s' * (count != 1)}:\n" + "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)


class DamagedInputError(RuntimeError):
    """A checkpoint or data file is damaged, incomplete or of another model; the message names it. Exit code 3."""

    exit_code = 3


class TrainingStoppedError(RuntimeError):
    """Training stopped by its own watch: non-finite values or replicas that differ. Exit code 4."""

    exit_code = 4


class SaveFailedError(RuntimeError):
    """A checkpoint could not be written: the message names ranks and files. What was complete before still is. Exit
    code 1."""

    exit_code = 1
