"""The fingerprint of a run: one line of hex floats and digests a step, in a folder that two runs are compared by.

The files:

* ``manifest.json``: see ``run_manifest.py``;
* ``fingerprint.jsonl``: one line per iteration by the first rank, independent of the layout;
* ``rank_00000.jsonl``, ...: the same keys for the local state of each rank.

A line leaves the process in one write, so a killed run leaves whole lines. Nothing is synced to the disk until
``close``: lines that a crash of the machine takes are written again, and checked, by the run that takes over. Torch is
not needed here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem, TrainingStoppedError
from megatron.core.dist_checkpointing.folder import naming

FINGERPRINT_FILE = "fingerprint.jsonl"
RANK_FILES = "rank_*.jsonl"

KEYS = (
    "iteration",
    "consumed_samples",
    "lm_loss",
    "load_balancing_loss",
    "z_loss",
    "mtp_1_loss",
    "grad_norm",
    "learning_rate",
    "params",
    "main_params",
    "exp_avg",
    "exp_avg_sq",
    "rng",
    "data",
)
"""Keys of every line, in order; further depths of multi-token prediction add ``mtp_2_loss``, ..."""

COUNTS = ("iteration", "consumed_samples")

Line = Mapping[str, int | str | None]


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank_{rank:05d}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one optimizer step shows. ``None`` is "not there"; digests are hex digits, 32 for those of state.

    ``load_balancing_loss`` is the sum over the configured auxiliary types, ``mtp_losses`` those of depth 1, 2, ...;
    ``rng`` is the digest of the key state, in a rank's own file that of its generators.
    """

    iteration: int
    consumed_samples: int
    lm_loss: float | None = None
    load_balancing_loss: float | None = None
    z_loss: float | None = None
    mtp_losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    learning_rate: float | None = None
    params: str | None = None
    main_params: str | None = None
    exp_avg: str | None = None
    exp_avg_sq: str | None = None
    rng: str | None = None
    data: str | None = None

    def line(self) -> dict[str, int | str | None]:
        """The record as it is written: floats as Python hex floats, every key there."""
        values: dict[str, int | str | None] = dict.fromkeys(KEYS)
        for name in KEYS:
            value = getattr(self, name, None)
            values[name] = value.hex() if isinstance(value, float) else value
        for depth, loss in enumerate(self.mtp_losses, 1):
            values[f"mtp_{depth}_loss"] = float(loss).hex()
        return values


def differing_fields(left: Line, right: Line) -> dict[str, tuple[int | str | None, int | str | None]]:
    """Fields that both lines have and that differ, with both values, in the order of the line."""
    return {
        key: (left[key], right[key])
        for key in left
        if left[key] is not None and right.get(key) is not None and left[key] != right[key]
    }


def parse_line(raw: bytes, path: Path, number: int) -> Line:
    """One line of a file.

    Raises:
        DamagedInputError: it is no JSON object with the keys of a line; names file and line.
    """
    try:
        line = json.loads(raw)
    except ValueError as error:
        raise DamagedInputError(f"{path}: line {number} is damaged ({error})") from error
    if not isinstance(line, dict) or not set(KEYS) <= set(line):
        raise DamagedInputError(f"{path}: line {number} is not a fingerprint line with the keys {', '.join(KEYS)}")
    counts = all(isinstance(line[key], int) and not isinstance(line[key], bool) for key in COUNTS)
    others = all(value is None or isinstance(value, str) for key, value in line.items() if key not in COUNTS)
    if not counts or not others:
        raise DamagedInputError(f"{path}: line {number} has values of the wrong type")
    return line


def read_lines(path: Path) -> dict[int, Line]:
    """Lines of a file by iteration.

    Raises:
        DamagedInputError: the file is missing, or a line is damaged, cut off or there twice; names file and line.
    """
    lines: dict[int, Line] = {}
    for number, _, raw in _raw_lines(path):
        if not raw.endswith(b"\n"):
            raise DamagedInputError(f"{path}: line {number}, the last one, is cut off")
        line = parse_line(raw, path, number)
        iteration = int(line["iteration"] or 0)
        if iteration in lines:
            raise DamagedInputError(f"{path}: line {number} is a second line of iteration {iteration}")
        lines[iteration] = line
    return lines


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes with the line end) of each line."""
    if not path.is_file():
        raise DamagedInputError(f"{path}: no such file")
    with path.open("rb") as file:
        yield from _placed(file)


def _placed(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, raw in enumerate(file, 1):
        yield number, offset, raw
        offset += len(raw)


class FingerprintFile:
    """One file, open for appending; lines that are there already are checked instead of repeated.

    A cut-off last line is what a full disk or a crashed machine leaves: it is removed when the file is opened. The file
    belongs to this process until it ends, on disks that have locks.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``, whose folder exists.

        Raises:
            ConfigError: another process writes it.
            DamagedInputError: a line before the last is damaged.
        """
        self.path = path
        self._known: dict[int, tuple[int, int]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise
        os.lseek(self._file, 0, os.SEEK_END)

    def _read(self) -> None:
        # By the handle that is locked: the lock of a process ends with the first of its handles that is closed.
        for number, offset, raw in _placed(os.fdopen(self._file, "rb", closefd=False)):
            if not raw.endswith(b"\n"):
                os.ftruncate(self._file, offset)
                break
            line = parse_line(raw, self.path, number)
            self._known[int(line["iteration"] or 0)] = (offset, len(raw))

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Others say that the disk has no locks.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                given = f"--fingerprint-dir {self.path.parent}, whose {self.path.name} another process is writing"
                raise ConfigError([Problem(given, "a folder of this run's own", "--fingerprint-dir")]) from error

    @property
    def known(self) -> Collection[int]:
        """Iterations with a line."""
        return self._known.keys()

    def write(self, record: StepRecord) -> None:
        """Append the line of a step, or compare it with the one that is there.

        Raises:
            TrainingStoppedError: it differs from the line an earlier launch wrote for this iteration; names the fields
                and both values.
        """
        line = record.line()
        if record.iteration in self._known:
            self._check(line, *self._known[record.iteration])
            return
        raw = json.dumps(line).encode() + b"\n"
        offset = os.lseek(self._file, 0, os.SEEK_CUR)
        with naming(self.path):
            written = os.write(self._file, raw)
        if written != len(raw):
            raise OSError(errno.ENOSPC, f"only {written} of {len(raw)} bytes of a line were written", str(self.path))
        self._known[record.iteration] = (offset, len(raw))

    def _check(self, line: Line, offset: int, length: int) -> None:
        before = parse_line(os.pread(self._file, length, offset), self.path, 0)
        different = differing_fields(before, line)
        if different:
            fields = "; ".join(f"{name}: {old} then, {new} now" for name, (old, new) in different.items())
            raise TrainingStoppedError(
                f"iteration {line['iteration']} of this run is not what {self.path} says of it: {fields}; "
                "megatron-determinism bisect finds the operation, another --fingerprint-dir lets the run go on"
            )

    def close(self) -> None:
        """Sync to the disk and close; safe to call twice."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


class FingerprintWriter:
    """Writes the lines of one rank: its own file, and on the first rank the layout-free one."""

    def __init__(self, folder: Path, shared: FingerprintFile | None, *, rank: int, interval: int) -> None:
        """Open this rank's own file; ``shared`` is the layout-free one of the first rank. ``prepare_folder`` has run
        there, and all ranks know.

        Raises:
            ConfigError: another process writes the file.
            DamagedInputError: a file is damaged.
        """
        self._interval = interval
        self._own = FingerprintFile(folder / rank_file(rank))
        self._shared = shared

    def wants(self, iteration: int) -> bool:
        """True where a line is due after this iteration; the same on all ranks."""
        return iteration % self._interval == 0

    @property
    def last_known(self) -> int:
        """Last iteration that one of the files has a line of; 0 for none."""
        return max(max(file.known, default=0) for file in self._files())

    def _files(self) -> list[FingerprintFile]:
        return [self._own] if self._shared is None else [self._own, self._shared]

    def write(self, shared: StepRecord, own: StepRecord) -> None:
        """Write a step: ``shared`` is layout-free and the same on all ranks (only the first rank keeps it), ``own``
        describes this rank's state.

        Raises:
            TrainingStoppedError: a line that is there already differs.
        """
        if self._shared is not None:
            self._shared.write(shared)
        self._own.write(own)

    def close(self) -> None:
        """Sync and close; safe to call twice."""
        for file in self._files():
            file.close()

    def __enter__(self) -> FingerprintWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
