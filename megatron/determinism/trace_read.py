"""Reading a trace folder: segment by segment, so that memory does not grow with the run; nothing is parsed that need
not be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.core.trace.format import FORMAT, TRACE_FILES, trace_file
from megatron.training.config.manifest import read_manifest

Key = tuple[tuple[str, Any], ...]
"""What a segment is known by: pass, iteration, chunk, logical shard, micro-batch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The lines of one part of a step."""

    key: Key
    events: list[bytes]

    @property
    def at(self) -> dict[str, Any]:
        """The key by name."""
        return dict(self.key)


class RankStream:
    """One rank's file, read once from front to end.

    After ``segments`` is exhausted, ``cut`` says why the file is not complete (``None``: it is).

    Raises:
        DamagedInputError: the file is missing, or its first line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.cut, self.num_events = path, "it holds no end", 0
        if not path.is_file():
            raise DamagedInputError(f"{path}: no such file, though the manifest says this rank was traced")
        with path.open("rb") as file:
            self.head = self._parsed(file.readline(), 1)
        if "trace" not in self.head:
            raise DamagedInputError(f"{path}: line 1 is not the head of a trace")

    def _parsed(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise DamagedInputError(f"{self.path}: line {number} is damaged ({error})") from error
        if not isinstance(line, dict):
            raise DamagedInputError(f"{self.path}: line {number} is no line of a trace")
        return line

    def segments(self) -> Iterator[Segment]:
        """Every segment that is whole or, at the end of a file that is cut off, its readable part.

        Raises:
            DamagedInputError: a line before the last is damaged.
        """
        open_segment: Segment | None = None
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    self.cut = f"line {number}, the last one, is cut off"
                    break
                if raw.startswith(b'{"e":'):
                    if open_segment is None:
                        raise DamagedInputError(f"{self.path}: line {number} is an event of no segment")
                    open_segment.events.append(raw)
                    self.num_events += 1
                elif number > 1:
                    if open_segment is not None:
                        yield open_segment
                        open_segment = None
                    open_segment = self._marker(self._parsed(raw, number), number)
        if open_segment is not None:
            yield open_segment

    def _marker(self, line: dict[str, Any], number: int) -> Segment | None:
        segment = line.get("segment")
        if isinstance(segment, dict) and {"pass", "iteration"} <= segment.keys():
            return Segment(tuple(segment.items()), [])
        if "closed" in line:
            self.cut = None
            if line["closed"] != self.num_events:
                raise DamagedInputError(
                    f"{self.path}: {line['closed']} events were written, {self.num_events} are there"
                )
        elif "end" not in line:
            raise DamagedInputError(f"{self.path}: line {number} is no line of a trace")
        return None


@dataclass(frozen=True, slots=True)
class TraceFolder:
    """A trace folder whose manifest was read."""

    path: Path
    trajectory: dict[str, Any]
    launch: dict[str, Any]
    level: str
    window: tuple[int, int | None]
    ranks: tuple[int, ...]

    def stream(self, rank: int) -> RankStream:
        """The file of one rank. Raises as ``RankStream``."""
        return RankStream(self.path / trace_file(rank))


class UnknownFormatError(Exception):
    """The folder was written by a version with another format; nothing in it is guessed."""


def open_folder(path: Path) -> TraceFolder:
    """Read the manifest of a trace folder.

    Raises:
        DamagedInputError: it is missing or damaged, or there is no file of a rank.
        UnknownFormatError: it is of another format.
    """
    manifest = read_manifest(path)
    trace = manifest.get("trace")
    if not isinstance(trace, dict):
        raise DamagedInputError(
            f"{path} is a fingerprint folder, which compare takes; trace-compare takes what runs had as --trace-dir"
        )
    if trace.get("format") != FORMAT:
        raise UnknownFormatError(f"{path} has trace format {trace.get('format')}, this version reads {FORMAT}")
    if not any(path.glob(TRACE_FILES)):
        raise DamagedInputError(f"{path} holds no {TRACE_FILES}")
    try:
        first, last = trace["iterations"]
        ranks, level, launch = tuple(trace["ranks"]), trace["level"], manifest["launches"][-1]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedInputError(f"{path}: its manifest is damaged ({error!r})") from error
    return TraceFolder(path, manifest["trajectory"], launch, level, (first, last), ranks)
