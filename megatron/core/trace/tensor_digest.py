"""Digests of a tensor's logical elements, made on its device without waiting for it.

``ops/digest_words/definition.py`` says what they are. Host tensors are digested by NumPy; on a device one launch, for
all tensors of an event, leaves partial sums in a buffer that is reused. All give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch

from megatron.core.ops.digest_rows import reference as rows_reference
from megatron.core.ops.digest_words import reference as words_reference
from megatron.core.ops.digest_words.definition import GROUP, TILE
from megatron.core.trace import host_digest
from megatron.core.trace.digest_queue import Digest, Queue, Sent, Waiting
from megatron.core.trace.tensor_words import readable, row_words

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
        self._queues: dict[tuple[int, int], Queue] = {}
        self.launches, self.bytes_read = 0, 0

    def whole(self, tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """Two numbers over all elements of each, in row-major order."""
        on_host = tensors[0].is_cpu
        if len(tensors) > 1 and not all(tensor.is_cpu is on_host and tensor.numel() for tensor in tensors):
            return [digest for tensor in tensors for digest in self.whole([tensor])]
        if not tensors[0].numel():
            return [[0, 0]]
        if not on_host:
            return self.on_device([readable(tensor) for tensor in tensors])
        # Past the dispatch mode of the op level, which would cost ten times the work itself.
        with torch._C._DisableTorchDispatch():
            return [host_digest.whole(tensor) for tensor in tensors]

    def on_device(self, tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """The digests of contiguous tensors of one device, by the op."""
        sizes = [tensor.nbytes for tensor in tensors]
        slots = [-(-size // BYTES_PER_SLOT) if size < MOST_SLOTS * BYTES_PER_SLOT else MOST_SLOTS for size in sizes]
        ends = list(accumulate(slots))
        if len(ends) > 1 and ends[-1] > self._capacity:
            return [digest for tensor in tensors for digest in self.on_device([tensor])]
        queue = self._queue(tensors[0].device)
        at, number = queue.place(ends)
        self._words(tensors, slots, queue.partial, at)
        self.launches += -(-len(tensors) // LAUNCHED_AT_ONCE)
        self.bytes_read += sum(sizes)
        return [Waiting(queue, number + n) for n in range(len(tensors))]

    def by_row(self, tensor: torch.Tensor) -> Digest:
        """1 + n numbers: over the rows (dimension 0) without their order, then over n runs of rows with it."""
        if tensor.numel() == 0:
            return [0]
        with torch._C._DisableTorchDispatch():
            words = row_words(tensor)
            if words.is_cpu:
                return host_digest.by_row(words, _run_length(len(words)))
            return self.rows_on_device(words)

    def rows_on_device(self, words: torch.Tensor) -> Digest:
        """The digests by row of ``row_words``, by the op."""
        count, width = words.shape
        length = _run_length(count)
        runs = -(-count // length)
        splits = min(MOST_PARTS, max(1, length // ROWS_PER_PART, count * width // WORDS_PER_PART), length)
        queue = self._queue(words.device)
        at, number = queue.place(range(splits, splits * runs + 1, splits))
        self._rows(words, length, splits, queue.partial, at)
        self.launches += 1
        self.bytes_read += 4 * count * width
        return Waiting(queue, number, runs)

    def adopt(self, digests: torch.Tensor) -> list[Digest]:
        """Digests that were made elsewhere, int64 ``[n, 2]`` on any device."""
        if digests.device.type == "cpu":
            return list(digests.tolist())
        queue = self._queue(digests.device)
        first = queue.adopt(digests) if len(digests) else 0
        return [Waiting(queue, first + n) for n in range(len(digests))]

    def _queue(self, device: torch.device) -> Queue:
        index = device.index  # None for the host
        key = (-1, 0) if index is None else (index, torch._C._cuda_getCurrentRawStream(index))
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = Queue(device, self._capacity)
        return queue

    def send(self) -> Sent:
        """All digests made since this was last called, on their way to the host; the host does not wait."""
        lines = {}
        for queue in self._queues.values():
            with torch.cuda.stream(queue.stream) if queue.stream is not None else nullcontext():
                lines[queue] = queue.send()
        return Sent(lines)


def _run_length(rows: int) -> int:
    """Rows of a run."""
    return -(-rows // CHUNKS)
