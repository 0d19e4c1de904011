"""LineWriter: fills digests into lines when they are there, in a thread of its own where a device still makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from megatron.core.trace.digest_queue import Sent
from megatron.core.trace.lines import Parts
from megatron.core.trace.reader import Note


class LineWriter:
    """``write`` takes the lines of a step at once, maybe in another thread; ``seconds`` is what filling and writing
    took."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.seconds = 0.0
        self._write = write
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def start(self, parts: Parts, sent: Sent) -> None:
        """Have lines written as soon as their digests are on the host; those given before are written first.

        Raises:
            OSError: these lines, or those before, could not be written.
        """
        self.settle()
        if sent.complete:
            self._finish(parts, sent)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "trace")
            self._writing = self._thread.submit(self._finish, parts, sent)

    def settle(self) -> None:
        """Wait until what was given is written.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _finish(self, parts: Parts, sent: Sent) -> None:
        sent.wait()
        start = time.perf_counter()
        texts = [part if isinstance(part, str) else ",".join([_entry(note, sent) for note in part]) for part in parts]
        if texts:
            self._write("".join(texts).encode())
        self.seconds += time.perf_counter() - start


def _entry(note: Note, sent: Sent) -> str:
    whole = f"{note.start}{sent.text(note.whole)}"
    if note.by_row is not None:
        rows, *chunks = sent.texts_by_row(note.by_row)
        listed = ",".join([f'"{chunk}"' for chunk in chunks])
        return f'{whole}","{rows}",[{listed}],{"true" if note.unwritten else "false"}]'
    return f'{whole}",null,[],true]' if note.unwritten else f'{whole}"]'
