"""Reader: notes type, shape and digest of tensors. Digests stay on the device, so the host does not wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron.core.trace.digest_queue import Digest, Promised, Sent
from megatron.core.trace.flatten import Named, named_tensors
from megatron.core.trace.format import tensor_start
from megatron.core.trace.storage import UnwrittenStorage
from megatron.core.trace.tensor_digest import Digester

_INDEX_TYPES = frozenset({torch.int16, torch.int32, torch.int64})


@contextmanager
def unseen() -> Iterator[None]:
    """What happens inside is a recorder's own work, and no event."""
    # Past the dispatch mode of the op level, which would cost ten times the work itself.
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


@dataclass(slots=True)
class Note:
    """A tensor as it was: its entry in a line up to the digest, and its digests, which may be pending."""

    start: str
    whole: Digest | Promised
    by_row: Digest | None = None
    unwritten: bool = False


@dataclass(slots=True)
class _Read:
    """A contiguous tensor that was read in this segment, what it was then, and its digests as far as they were asked
    for."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    dtype: torch.dtype
    shape: torch.Size
    whole: Digest
    by_row: Digest | None


class Reader:
    """``busy`` while it reads, which is no part of the run. ``digester`` may be replaced by one with faster ops.

    With ``trusting`` a tensor that was digested in the same segment, and that torch's version counter says is unchanged
    since, is not read again where a caller allows that. A write behind torch's back, a race for instance, then shows
    in what is made of the tensor, and not between the two.

    ``tensors`` counts those looked at, ``known`` those of them whose digest was known.
    """

    def __init__(self, *, trusting: bool) -> None:
        self.trusting, self.busy = trusting, False
        self.unwritten = UnwrittenStorage()
        self.digester = Digester()
        self.tensors, self.known = 0, 0
        self._recent: dict[int, _Read] = {}

    def forget(self) -> None:
        """Another segment begins: whatever is seen is read."""
        self._recent.clear()

    def send(self) -> Sent:
        """The digests of all notes so far, on their way to the host."""
        with unseen():
            sent = self.digester.send()
        self.forget()
        self.unwritten.clear()
        return sent

    def note(
        self, value: Any, label: str = "", *, rows: bool = False, flag: bool = False, reuse: bool = False
    ) -> list[Note]:
        """As ``noted``, for every tensor in ``value``."""
        found = [(label, value)] if type(value) is torch.Tensor else named_tensors(value, label)
        return self.noted(found, rows=rows, flag=flag, reuse=reuse)

    def noted(
        self, tensors: Sequence[Named], *, rows: bool = False, flag: bool = False, reuse: bool = False
    ) -> list[Note]:
        """Digest tensors as they are now, by one launch; with ``rows`` also by row, as index-like ones always are. With
        ``flag`` storage that was never seen written is marked, with ``reuse`` digests that are known are taken."""
        self.busy = True
        try:
            return self._noted(tensors, rows, flag, reuse and self.trusting)
        finally:
            self.busy = False

    def _noted(self, tensors: Sequence[Named], rows: bool, flag: bool, reuse: bool) -> list[Note]:
        notes: list[Note] = []
        unread: list[torch.Tensor] = []
        waiting: list[Note] = []
        for label, tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_meta:
                continue
            dtype, shape, contiguous = tensor.dtype, tensor.shape, tensor.is_contiguous()
            read = self._known(tensor, dtype) if reuse and contiguous else None
            start = tensor_start(label, dtype, shape, None if contiguous else tensor.stride())
            note = Note(start, [] if read is None else read.whole)
            if read is None:
                unread.append(tensor)
                waiting.append(note)
            if flag:
                note.unwritten = self.unwritten.holds(tensor)
            if (rows or dtype in _INDEX_TYPES) and shape:
                note.by_row = self._by_row(tensor, shape, read)
            notes.append(note)
        if unread:
            for tensor, note, digest in zip(unread, waiting, self.digester.whole(unread), strict=True):
                note.whole = digest
                if self.trusting and tensor.is_contiguous():
                    self._recent[tensor.data_ptr()] = _Read(
                        weakref.ref(tensor), tensor._version, tensor.dtype, tensor.shape, digest, note.by_row
                    )
        self.tensors += len(notes)
        self.known += len(notes) - len(unread)
        return notes

    def _known(self, tensor: torch.Tensor, dtype: torch.dtype) -> _Read | None:
        read = self._recent.get(tensor.data_ptr())
        if read is None or read.dtype is not dtype or read.shape.numel() != tensor.numel():
            return None
        seen, version = read.tensor(), read.version
        unchanged = seen is not None and seen._version == version and tensor._version == version
        return read if unchanged else None

    def _by_row(self, tensor: torch.Tensor, shape: torch.Size, read: _Read | None) -> Digest:
        if read is None or read.shape != shape:
            return self.digester.by_row(tensor)
        if read.by_row is None:
            read.by_row = self.digester.by_row(tensor)
        return read.by_row

    def starts(self, what: Iterable[tuple[str, torch.dtype, int]]) -> list[str]:
        """What a line says of flat tensors up to their digests; label, type and number of elements of each."""
        return [tensor_start(label, dtype, (numel,), None) for label, dtype, numel in what]

    def note_digests(self, starts: Sequence[str], digests: torch.Tensor) -> list[Note]:
        """Notes of flat tensors whose digests ``[n, 2]`` were made elsewhere."""
        notes = self.promise(starts)
        self.keep(notes, digests)
        return notes

    def promise(self, starts: Sequence[str]) -> list[Note]:
        """The same, to be recorded before the digests are made: ``keep`` has to follow in the same step."""
        return [Note(start, Promised()) for start in starts]

    def keep(self, promised: Sequence[Note], digests: torch.Tensor) -> None:
        """Give promised notes their digests ``[n, 2]``."""
        for note, digest in zip(promised, self.digester.adopt(digests), strict=True):
            cast(Promised, note.whole).made = digest
