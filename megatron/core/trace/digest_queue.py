"""Digests in flight: made on a device, added up there, and copied to the host once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


class Queue:
    """Partial sums ``[2, CAPACITY]`` made on one stream, one digest after the other, and what they were added up to."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.partial = torch.empty(2, capacity, dtype=torch.int64, device=device)
        self._used, self._count = 0, 0
        self._ends: list[int] = []
        self._lines: list[torch.Tensor] = []

    def place(self, ends: Sequence[int]) -> tuple[int, int]:
        """Room for digests of some partial sums each, side by side: the first column, and the first's number. ``ends``
        says how many partial sums there are up to each digest's last."""
        if self._used + ends[-1] > self.partial.shape[1]:
            self.collect()
        at, number = self._used, self._count
        self._used += ends[-1]
        self._count += len(ends)
        self._ends += [at + end - 1 for end in ends]
        return at, number

    def collect(self) -> None:
        """Add up what is there, on the device; runs on the queue's stream."""
        if not self._ends:
            return
        with torch._C._DisableTorchDispatch():
            self._collect()

    def _collect(self) -> None:
        ends = torch.tensor(self._ends)
        if self.stream is not None:
            ends = ends.pin_memory().to(self.partial.device, non_blocking=True)
        # Running sums wrap; their differences are exact all the same.
        upto = torch.stack([lane[: self._used].cumsum(0)[ends] for lane in self.partial])
        self._lines.append(torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1])))
        self._used, self._ends = 0, []

    def adopt(self, digests: torch.Tensor) -> int:
        """Append finished digests int64 ``[n, 2]``; the number of the first."""
        if len(digests) > self.partial.shape[1]:
            self.collect()
            self._lines.append(digests.t())
            number, self._count = self._count, self._count + len(digests)
            return number
        at, number = self.place(range(1, len(digests) + 1))
        with torch._C._DisableTorchDispatch():
            self.partial[:, at : at + len(digests)].copy_(digests.t())
        return number

    def send(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy on the host ``[2, n]``, complete after the event, and start again."""
        self.collect()
        lines = torch.cat(self._lines, dim=1) if self._lines else self.partial[:, :0]
        self._lines, self._count = [], 0
        if self.stream is None:
            return lines.clone(), None
        copy = torch.empty(lines.shape, dtype=torch.int64, pin_memory=True)
        copy.copy_(lines, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        return copy, arrived


@dataclass(slots=True)
class Waiting:
    """A digest whose partial sums are on a device, number ``position`` of those in its queue; ``runs`` runs of rows, 0
    for a whole tensor."""

    queue: Queue
    position: int
    runs: int = 0


Digest: TypeAlias = list[int] | Waiting
"""Numbers that are here, or on their way."""


@dataclass(slots=True)
class Promised:
    """A digest that is still to be made, before digests are sent."""

    made: Digest | None = None


class Sent:
    """Digests on their way to the host; ``wait`` before anything is asked. It may be used in another thread."""

    def __init__(self, lines: dict[Queue, tuple[torch.Tensor, torch.cuda.Event | None]]) -> None:
        self._lines = lines
        self._numbers: dict[Queue, Any] = {}
        self._texts: dict[Queue, str] = {}

    @property
    def complete(self) -> bool:
        """Whether there is nothing to wait for."""
        return all(arrived is None for _, arrived in self._lines.values())

    def wait(self) -> None:
        """Until they are all here."""
        for queue, (copy, arrived) in self._lines.items():
            if arrived is not None:
                arrived.synchronize()
            self._numbers[queue] = copy.numpy()
            self._texts[queue] = self._numbers[queue].T.astype(">i8").tobytes().hex()

    def text(self, digest: Digest | Promised) -> str:
        """A digest of a whole tensor in 32 hex digits.

        Raises:
            RuntimeError: it was promised, and not made.
        """
        made = digest.made if isinstance(digest, Promised) else digest
        if isinstance(made, Waiting):
            at = 32 * made.position
            return self._texts[made.queue][at : at + 32]
        if made is None:
            raise RuntimeError("a digest was promised and not made")
        return "".join(map(_hex64, made))

    def texts_by_row(self, digest: Digest) -> list[str]:
        """The numbers of a digest by row, in 16 hex digits each."""
        if isinstance(digest, list):
            return list(map(_hex64, digest))
        at, end, texts = digest.position, digest.position + digest.runs, self._texts[digest.queue]
        rows = int(self._numbers[digest.queue][0, at:end].sum())
        return [_hex64(rows), *(texts[place : place + 16] for place in range(32 * at + 16, 32 * end, 32))]


def _hex64(value: int) -> str:
    """16 hex digits of a signed 64-bit integer."""
    return f"{value & ((1 << 64) - 1):016x}"
