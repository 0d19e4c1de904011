"""Output that cannot be written any more, as into a pipe whose reader went away (``| head -1``, a ``tee`` that was
killed): whoever writes it lives on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast


class Outlasting:
    """A text stream as it is, until it cannot be written any more: what is written after that goes nowhere. ``note`` is
    said once then, on standard error, with the reason in the place of ``{reason}``.

    A line goes out as a whole: ``print`` writes its end by itself, and threads and ranks that share a pipe would have
    theirs in each other's."""

    def __init__(self, stream: TextIO, note: str | None = None) -> None:
        self._stream, self._note = stream, note
        self._lost: OSError | None = None
        self._begun = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As ``TextIO.write``; what the stream's encoding has no characters for is written as escapes."""
        lines, end, rest = (self._take_begun() + text).rpartition("\n")
        self._begun.text = rest
        self._put(lines + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As ``TextIO.writelines``."""
        self.write("".join(lines))

    def flush(self) -> None:
        """As ``TextIO.flush``; also what this thread has of a line."""
        self._put(self._take_begun())
        with self._living_on():
            self._stream.flush()

    def _take_begun(self) -> str:
        text, self._begun.text = getattr(self._begun, "text", ""), ""
        return text

    def _put(self, text: str) -> None:
        with self._living_on():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def require_written(self) -> None:
        """Nobody has missed anything: all was written, or nobody wanted to read it.

        Raises:
            OSError: some was not, as on a full disk; says that it is standard output.
        """
        if self._lost is not None and not isinstance(self._lost, BrokenPipeError):
            raise OSError(f"standard output: {self._lost}") from self._lost

    @contextlib.contextmanager
    def _living_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._lost = error
            # What is left in buffers must not be tried again, by the interpreter's end at the latest.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._note is not None:
                print(self._note.format(reason=error.strerror), file=sys.stderr, flush=True)


@contextlib.contextmanager
def outlasting_readers(note: str | None = None) -> Iterator[Outlasting]:
    """In the block nothing fails because standard output, which it yields, or standard error cannot be written;
    ``note`` is said where that is standard output. One that was closed from the start goes nowhere, too. Also a
    decorator."""
    with contextlib.ExitStack() as closing:
        out, error = (
            stream or closing.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            for stream in (sys.stdout, sys.stderr)
        )
        outlasting, errors = Outlasting(out, note), Outlasting(error)
        closing.enter_context(contextlib.redirect_stdout(cast(TextIO, outlasting)))
        closing.enter_context(contextlib.redirect_stderr(cast(TextIO, errors)))
        closing.callback(errors.flush)
        closing.callback(outlasting.flush)
        yield outlasting
