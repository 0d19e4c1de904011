"""The fingerprint writer of a rank among others: what stops one of them stops all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, TrainingStoppedError
from megatron.core.process_groups.collectives import gather_objects
from megatron.core.process_groups.groups import Group
from megatron.training.observe.fingerprint import FingerprintFile, FingerprintWriter, StepRecord


@contextlib.contextmanager
def stopping_together(group: Group) -> Iterator[None]:
    """What one rank raises in the block stops every rank after it; collective.

    Raises:
        ConfigError, DamagedInputError, TrainingStoppedError: the rank's own, else that of the first rank that has one,
            which is named.
    """
    failure: ConfigError | DamagedInputError | TrainingStoppedError | None = None
    try:
        yield
    except (ConfigError, DamagedInputError, TrainingStoppedError) as error:
        failure = error
    said: list[Any] = gather_objects(group, failure)
    if failure is not None:
        raise failure
    for rank, found in enumerate(said):
        if isinstance(found, ConfigError):
            raise ConfigError([replace(problem, given=f"rank {rank}: {problem.given}") for problem in found.problems])
        if found is not None:
            raise type(found)(f"rank {rank}: {found}")


class AgreedWriter:
    """``FingerprintWriter`` on every rank of ``group``: files are opened, and lines that are there already compared,
    by all of them together. New lines cost no meeting.

    Raises:
        ConfigError: another process writes a file; on every rank.
        DamagedInputError: a file is damaged; on every rank.
    """

    def __init__(self, group: Group, folder: Path, shared: FingerprintFile | None, *, rank: int, interval: int) -> None:
        self._group = group
        with stopping_together(group):
            self._writer = FingerprintWriter(folder, shared, rank=rank, interval=interval)
        last: list[Any] = gather_objects(group, self._writer.last_known)
        self._last_known = max(last)

    def wants(self, iteration: int) -> bool:
        """True where a line is due after this iteration; the same on all ranks."""
        return self._writer.wants(iteration)

    def compares(self, iteration: int) -> bool:
        """Whether some rank has a line of this iteration, or of a later one, already; the same on all ranks."""
        return iteration <= self._last_known

    def write(self, shared: StepRecord, own: StepRecord) -> None:
        """Write a step, on every rank. See ``FingerprintWriter.write``.

        Raises:
            TrainingStoppedError: a line that is there already differs on some rank; on every rank.
        """
        if not self.compares(shared.iteration):
            self._writer.write(shared, own)
            return
        with stopping_together(self._group):
            self._writer.write(shared, own)

    def close(self) -> None:
        """Sync and close; safe to call twice."""
        self._writer.close()
