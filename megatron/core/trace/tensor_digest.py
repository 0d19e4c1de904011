"""Digests of a tensor's logical elements, made on its device without waiting for it.

``ops/digest_words/definition.py`` says what they are. Gaps between strided elements are not read, so padding cannot
show. Host tensors are digested by NumPy, whose calls cost less; on a device one launch, for all tensors of an event,
leaves partial sums in a buffer that is there, and those of a step are added up and sent to the host at once. All give
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy
import torch

from megatron.core.ops.digest_rows import reference as rows_reference
from megatron.core.ops.digest_words import reference as words_reference
from megatron.core.ops.digest_words.definition import GROUP, ROW, TILE, mix, place_keys, position_keys, tile_keys

CHUNKS = 16
"""Most runs of rows that get a digest of their own."""

MOST_SLOTS = 528
"""Partial sums of one large tensor: four programs for each multiprocessor of an H200."""
BYTES_PER_SLOT = 4 * TILE * GROUP
ROWS_PER_PART, MOST_PARTS, WORDS_PER_PART = 256, 32, 1 << 17
CAPACITY = 1 << 19
"""Partial sums that are kept before they are added up."""
LAUNCHED_AT_ONCE = 4
"""Tensors that one launch digests."""
TABLE_WORDS = 64 * TILE
"""Words of a host tensor that are digested at once."""
_PLACES = numpy.arange(TILE, dtype=numpy.int64)


class _Queue:
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
class _Waiting:
    """A digest whose partial sums are on a device, number ``position`` of those in its queue; ``runs`` runs of rows, 0
    for a whole tensor."""

    queue: _Queue
    position: int
    runs: int = 0


@dataclass(slots=True)
class Promised:
    """A digest that is still to be made, before digests are sent."""

    made: list[int] | _Waiting | None = None


Digest: TypeAlias = list[int] | _Waiting | Promised
"""Numbers that are here, or on their way."""


class Sent:
    """Digests on their way to the host; ``wait`` before anything is asked. It may be used in another thread."""

    def __init__(self, lines: dict[_Queue, tuple[torch.Tensor, torch.cuda.Event | None]]) -> None:
        self._lines = lines
        self._numbers: dict[_Queue, Any] = {}
        self._texts: dict[_Queue, str] = {}

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

    def numbers(self, digest: Digest) -> list[int]:
        """The numbers of a digest."""
        digest = _made(digest)
        if isinstance(digest, list):
            return digest
        lines, at, runs = self._numbers[digest.queue], digest.position, digest.runs
        if not runs:
            return lines[:, at].tolist()
        return [int(lines[0, at : at + runs].sum()), *lines[1, at : at + runs].tolist()]

    def text(self, digest: Digest) -> str:
        """A digest of a whole tensor in 32 hex digits."""
        if isinstance(digest, _Waiting):
            at = 32 * digest.position
            return self._texts[digest.queue][at : at + 32]
        return "".join(map(hex64, digest)) if isinstance(digest, list) else self.text(_made(digest))

    def texts_by_row(self, digest: Digest) -> list[str]:
        """The numbers of a digest by row, in 16 hex digits each."""
        digest = _made(digest)
        if isinstance(digest, list):
            return list(map(hex64, digest))
        at, end, texts = digest.position, digest.position + digest.runs, self._texts[digest.queue]
        rows = int(self._numbers[digest.queue][0, at:end].sum())
        return [hex64(rows), *(texts[place : place + 16] for place in range(32 * at + 16, 32 * end, 32))]


def _made(digest: Digest) -> list[int] | _Waiting:
    if not isinstance(digest, Promised):
        return digest
    if digest.made is None:
        raise RuntimeError("a digest was promised and not made")
    return digest.made


class Digester:
    """Makes digests; ``words`` and ``rows`` are the ops ``digest_words`` and ``digest_rows``. ``launches`` and
    ``bytes_read`` count what was asked of a device."""

    def __init__(
        self,
        words: Callable[..., None] = words_reference.digest_words,
        rows: Callable[..., None] = rows_reference.digest_rows,
        capacity: int = CAPACITY,
    ) -> None:
        self._words, self._rows, self._capacity = words, rows, capacity
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._row_keys = numpy.zeros(0, dtype=numpy.int64)
        self.launches, self.bytes_read = 0, 0

    def whole(self, tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """Two numbers over all elements of each, in row-major order; all on one device."""
        if tensors[0].is_cpu:
            # Past the dispatch mode of the op level, which would cost ten times the work itself.
            with torch._C._DisableTorchDispatch():
                return [_on_host(tensor.detach()) if tensor.numel() else [0, 0] for tensor in tensors]
        if all(map(torch.numel, tensors)):
            return self.on_device([_readable(tensor) for tensor in tensors])
        return [digest for tensor in tensors for digest in (self.whole([tensor]) if tensor.numel() else [[0, 0]])]

    def on_device(self, tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """The digests of contiguous tensors of one device, by the op."""
        sizes = [tensor.nbytes for tensor in tensors]
        slots = [min(MOST_SLOTS, -(-size // BYTES_PER_SLOT)) for size in sizes]
        if len(slots) > 1 and sum(slots) > self._capacity:
            return [digest for tensor in tensors for digest in self.on_device([tensor])]
        queue = self._queue(tensors[0].device)
        at, number = queue.place(list(accumulate(slots)))
        self._words(tensors, slots, queue.partial, at)
        self.launches += -(-len(tensors) // LAUNCHED_AT_ONCE)
        self.bytes_read += sum(sizes)
        return [_Waiting(queue, number + n) for n in range(len(tensors))]

    def by_row(self, tensor: torch.Tensor) -> Digest:
        """1 + n numbers: over the rows (dimension 0) without their order, then over n runs of rows with it."""
        if tensor.numel() == 0:
            return [0]
        with torch._C._DisableTorchDispatch():
            return self._by_row(tensor)

    def _by_row(self, tensor: torch.Tensor) -> Digest:
        words = row_words(tensor)
        if not words.is_cpu:
            return self.rows_on_device(words)
        count, numbers = words.shape[0], words.numpy().view(numpy.uint32)
        keys = self._keys(words.shape[1]).view(numpy.uint64)
        row = numpy.dot(numbers.astype(numpy.uint64), keys).view(numpy.int64)
        placed = mix(row + position_keys(numpy.arange(count, dtype=numpy.int64)), ROW)
        length = -(-count // CHUNKS)
        return [int(mix(row, ROW).sum()), *(int(placed[s : s + length].sum()) for s in range(0, count, length))]

    def rows_on_device(self, words: torch.Tensor) -> Digest:
        """The digests by row of ``row_words``, by the op."""
        count, width = words.shape
        length = -(-count // CHUNKS)
        runs = -(-count // length)
        splits = min(MOST_PARTS, max(1, length // ROWS_PER_PART, count * width // WORDS_PER_PART), length)
        queue = self._queue(words.device)
        at, number = queue.place(range(splits, splits * runs + 1, splits))
        self._rows(words, length, splits, queue.partial, at)
        self.launches += 1
        self.bytes_read += 4 * count * width
        return _Waiting(queue, number, runs)

    def _keys(self, count: int) -> Any:
        if self._row_keys.size < count:
            self._row_keys = position_keys(numpy.arange(1 << (count - 1).bit_length(), dtype=numpy.int64)) | 1
        return self._row_keys[:count]

    def adopt(self, digests: torch.Tensor) -> list[list[int] | _Waiting]:
        """Digests that were made elsewhere, int64 ``[n, 2]`` on any device."""
        if digests.device.type == "cpu":
            return list(digests.tolist())
        queue = self._queue(digests.device)
        first = queue.adopt(digests) if len(digests) else 0
        return [_Waiting(queue, first + n) for n in range(len(digests))]

    def _queue(self, device: torch.device) -> _Queue:
        index = device.index  # None for the host
        key = (-1, 0) if index is None else (index, torch._C._cuda_getCurrentRawStream(index))
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(device, self._capacity)
        return queue

    def send(self) -> Sent:
        """All digests made since this was last called, on their way to the host; nobody waits."""
        lines = {}
        for queue in self._queues.values():
            with torch.cuda.stream(queue.stream) if queue.stream is not None else nullcontext():
                lines[queue] = queue.send()
        return Sent(lines)

    def numbers(self, digests: Sequence[Digest]) -> list[list[int]]:
        """The numbers of all digests made since they were last sent; waits for their devices."""
        sent = self.send()
        sent.wait()
        return [sent.numbers(digest) for digest in digests]


def _on_host(tensor: torch.Tensor) -> Digest:
    flat = _readable(tensor).view(-1).view(torch.uint8)
    words = _padded(flat.view(1, -1))[0].numpy().view(numpy.uint32)
    if words.size <= TABLE_WORDS:
        wide = words.astype(numpy.uint64)
        return [_wrapped(int(numpy.dot(wide, keys[: wide.size]))) for keys in _host_keys()]
    total = [0, 0]
    for begin in range(0, words.size, TABLE_WORDS):
        part = words[begin : begin + TABLE_WORDS].astype(numpy.uint64)
        tiles = numpy.arange(begin // TILE, -(-(begin + part.size) // TILE), dtype=numpy.int64)
        whole = part.size // TILE * TILE
        for lane, (place, tile) in enumerate(zip(place_keys(_PLACES), tile_keys(tiles), strict=True)):
            places, sums = place.view(numpy.uint64), numpy.zeros(tiles.size, dtype=numpy.uint64)
            sums[: whole // TILE] = numpy.dot(part[:whole].reshape(-1, TILE), places)
            if whole < part.size:
                sums[-1] = numpy.dot(part[whole:], places[: part.size - whole])
            total[lane] += int(numpy.dot(sums, tile.view(numpy.uint64)))
    return [_wrapped(lane) for lane in total]


@cache
def _host_keys() -> list[Any]:
    """Both keys of the first words of a tensor, place and tile together."""
    tiles = numpy.arange(TABLE_WORDS // TILE, dtype=numpy.int64)
    pairs = zip(place_keys(_PLACES), tile_keys(tiles), strict=True)
    return [(tile[:, None] * place).reshape(-1).view(numpy.uint64) for place, tile in pairs]


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its bytes lie in row-major order from a multiple of 4 on, otherwise a copy."""
    if tensor.is_contiguous() and not (tensor.data_ptr() % 4 or tensor.is_conj() or tensor.is_neg()):
        return tensor
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def row_words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not empty as int32 ``[rows, words]``: the bytes of each row, filled up with zeros."""
    tensor = _readable(tensor.detach() if tensor.requires_grad else tensor)
    count, bytes_a_row = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    if bytes_a_row % 4:
        return _padded(tensor.view(-1).view(torch.uint8).view(count, -1)).view(torch.int32)
    if tensor.dim() == 2 and tensor.stride() == (tensor.shape[1], 1):
        return tensor.view(torch.int32)
    return tensor.view(-1).view(torch.int32).view(count, -1)


def _padded(raw: torch.Tensor) -> torch.Tensor:
    """Rows filled with zeros to whole words of 4 bytes."""
    missing = -raw.shape[1] % 4
    return torch.nn.functional.pad(raw, (0, missing)) if missing else raw


def hex64(value: int) -> str:
    """16 hex digits of a signed 64-bit integer."""
    return f"{value & ((1 << 64) - 1):016x}"
