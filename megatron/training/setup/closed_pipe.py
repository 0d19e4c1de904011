"""Output whose reader goes away (``| head -1``, a ``tee`` that was killed): whoever writes it lives on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Outlasting:
    """A text stream as it is, until nobody reads it any more: what is written after that goes nowhere. ``note`` is said
    once then, on standard error."""

    def __init__(self, stream: TextIO, note: str | None = None) -> None:
        self._stream, self._note = stream, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As ``TextIO.write``."""
        with self._without_reader():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As ``TextIO.flush``."""
        with self._without_reader():
            self._stream.flush()

    @contextlib.contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # What is left in buffers must not be tried again, by the interpreter's end at the latest.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._note is not None:
                print(self._note, file=sys.stderr, flush=True)


@contextlib.contextmanager
def outlasting_readers(note: str | None = None) -> Iterator[None]:
    """In the block nothing fails because the reader of standard output or standard error is gone; ``note`` is said
    where it is that of standard output. Also a decorator."""
    out, error = Outlasting(sys.stdout, note), Outlasting(sys.stderr)
    with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, error)):
        try:
            yield
        finally:
            out.flush()
            error.flush()
