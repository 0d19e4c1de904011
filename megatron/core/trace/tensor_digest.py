"""Digests of a tensor's logical elements, made on its device without waiting for it.

``ops/digest_words/definition.py`` says what they are. Gaps between strided elements are not read, so padding cannot
show. Host tensors are digested by NumPy, whose calls cost less; on a device one launch leaves partial sums, which are
added up for all digests of a step at once. All give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy
import torch

from megatron.core.ops.digest_rows import reference as rows_reference
from megatron.core.ops.digest_words import reference as words_reference
from megatron.core.ops.digest_words.definition import FIRST, ROW, SECOND, TILE, Words, mix, position_keys

CHUNKS = 16
"""Most runs of rows that get a digest of their own."""

MOST_SLOTS = 512
"""Partial sums of one large tensor: enough programs to keep a device busy."""
ROWS_PER_PART, MOST_PARTS = 256, 32
_COLLECT_AT = 1 << 22
"""Partial sums that wait before they are added up."""


@dataclass(slots=True)
class _Waiting:
    """A digest whose partial sums are on a device, number ``position`` of those in its queue; ``runs`` runs of rows, 0
    for a whole tensor."""

    queue: _Queue
    position: int
    runs: int = 0


Digest: TypeAlias = list[int] | _Waiting
"""Numbers that are here, or on their way."""


class _Queue:
    """Partial sums ``[2, n]`` made on one stream, one digest after the other, and what they were added up to."""

    def __init__(self) -> None:
        self._partial: list[torch.Tensor] = []
        self._ends: list[int] = []
        self._lines: list[torch.Tensor] = []
        self._size = 0
        self._count = 0
        self.numbers: tuple[list[int], list[int]] = ([], [])

    def put(self, partial: torch.Tensor, segments: int) -> int:
        """Append ``segments`` equal segments of partial sums; returns the number of the first."""
        first = self._count
        step = partial.shape[1] // segments
        self._partial.append(partial)
        self._ends.extend(range(self._size + step, self._size + partial.shape[1] + 1, step))
        self._size += partial.shape[1]
        self._count += segments
        if self._size >= _COLLECT_AT:
            self.collect()
        return first

    def collect(self) -> None:
        """Add up what waits, on the device."""
        if not self._partial:
            return
        running = torch.cat(self._partial, dim=1)
        ends = torch.tensor(self._ends) - 1
        if running.device.type == "cuda":
            ends = ends.pin_memory().to(running.device, non_blocking=True)
        # Running sums wrap; their differences are exact all the same.
        upto = torch.stack([lane.cumsum(0)[ends] for lane in running])
        self._lines.append(torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1])))
        self._partial, self._ends, self._size = [], [], 0

    def take(self) -> None:
        """Bring both lanes of every segment to the host, and start again; waits for the device."""
        self.collect()
        first, second = torch.cat(self._lines, dim=1).tolist() if self._lines else ([], [])
        self.numbers = first, second
        self._lines, self._count = [], 0


class Digester:
    """Makes digests; ``words`` and ``rows`` are the ops ``digest_words`` and ``digest_rows``."""

    def __init__(
        self,
        words: Callable[..., torch.Tensor] = words_reference.digest_words,
        rows: Callable[..., torch.Tensor] = rows_reference.digest_rows,
    ) -> None:
        self._words, self._rows = words, rows
        self._queues: dict[tuple[torch.device, int], _Queue] = {}
        self._on_host = numpy.zeros(0, dtype=numpy.int64)

    def _position(self, count: int) -> Words:
        if self._on_host.size < count:
            size = max(1024, 1 << (count - 1).bit_length())
            self._on_host = position_keys(numpy.arange(size, dtype=numpy.int64))
        return self._on_host[:count]

    def whole(self, tensor: torch.Tensor) -> Digest:
        """Two numbers over all elements in row-major order."""
        if tensor.numel() == 0:
            return [0, 0]
        raw = _bytes(tensor, 1)
        if raw.device.type == "cpu":
            words = _padded(raw).numpy().view(numpy.int64)[0]
            mixed = mix(words ^ self._position(words.shape[0]), FIRST)
            return [int(mixed.sum()), int(mix(mixed, SECOND).sum())]
        return self.on_device(raw[0])

    def on_device(self, raw: torch.Tensor) -> Digest:
        """The digest of flat bytes by the op."""
        raw = raw if raw.data_ptr() % 8 == 0 else raw.clone()
        slots = min(MOST_SLOTS, -(-raw.numel() // (8 * TILE)))
        queue = self._queue(raw.device)
        return _Waiting(queue, queue.put(self._words(raw, slots), 1))

    def by_row(self, tensor: torch.Tensor) -> Digest:
        """1 + n numbers: over the rows (dimension 0) without their order, then over n runs of rows with it."""
        if tensor.numel() == 0:
            return [0]
        count = tensor.shape[0]
        raw = _padded(_bytes(tensor, count))
        if raw.device.type != "cpu":
            return self.rows_on_device(raw)
        words = raw.numpy().view(numpy.int64)
        row = mix(words ^ self._position(words.shape[1]), FIRST).sum(1)
        placed = mix(row + self._position(count), ROW)
        length = -(-count // CHUNKS)
        return [int(mix(row, ROW).sum()), *(int(placed[s : s + length].sum()) for s in range(0, count, length))]

    def rows_on_device(self, raw: torch.Tensor) -> Digest:
        """The digests by row of ``[rows, bytes]``, whole words, by the op."""
        raw = raw if raw.data_ptr() % 8 == 0 else raw.clone()
        words = raw.view(torch.int64)
        length = -(-words.shape[0] // CHUNKS)
        runs = -(-words.shape[0] // length)
        splits = min(MOST_PARTS, max(1, length // ROWS_PER_PART, words.numel() // (64 * TILE)), length)
        queue = self._queue(raw.device)
        return _Waiting(queue, queue.put(self._rows(words, length, splits), runs), runs)

    def adopt(self, digests: torch.Tensor) -> list[Digest]:
        """Digests that were made elsewhere, int64 ``[n, 2]`` on any device."""
        if digests.device.type == "cpu":
            return list(digests.tolist())
        queue = self._queue(digests.device)
        first = queue.put(digests.t().contiguous(), len(digests)) if len(digests) else 0
        return [_Waiting(queue, first + n) for n in range(len(digests))]

    def _queue(self, device: torch.device) -> _Queue:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if (device, stream) not in self._queues:
            self._queues[device, stream] = _Queue()
        return self._queues[device, stream]

    def numbers(self, digests: list[Digest]) -> list[list[int]]:
        """The numbers of all digests made since this was last asked; waits for their devices."""
        for device in {device for device, _ in self._queues if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # other streams too
        for queue in self._queues.values():
            queue.take()
        return [digest if isinstance(digest, list) else _finished(digest) for digest in digests]


def _finished(digest: _Waiting) -> list[int]:
    at, runs, (first, second) = digest.position, digest.runs, digest.queue.numbers
    if not runs:
        return [first[at], second[at]]
    return [_wrapped(sum(first[at : at + runs])), *second[at : at + runs]]


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _bytes(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor's bytes in row-major order, ``[rows, bytes]``."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(rows, flat.numel() * flat.element_size() // rows)


def _padded(raw: torch.Tensor) -> torch.Tensor:
    """Rows filled with zeros to whole words of 8 bytes."""
    missing = -raw.shape[1] % 8
    return torch.nn.functional.pad(raw, (0, missing)) if missing else raw


def hex64(value: int) -> str:
    """16 hex digits of a signed 64-bit integer."""
    return f"{value & ((1 << 64) - 1):016x}"
