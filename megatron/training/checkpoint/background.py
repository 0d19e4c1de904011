"""A save in the background: a private copy of the state, written by one thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron.core.config.errors import SaveFailedError
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece


class Snapshots:
    """Copies pieces to host memory; from a GPU into pinned buffers that are kept for the next copy."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, pieces: Sequence[StoredPiece]) -> list[StoredPiece]:
        """The same pieces with values of their own. When it returns, the originals may change."""
        copies = [replace(piece, values=self._copy(piece)) for piece in pieces]
        if any(piece.values.is_cuda for piece in pieces):
            torch.cuda.synchronize()
        return copies

    def _copy(self, piece: StoredPiece) -> torch.Tensor:
        if not piece.values.is_cuda:
            return piece.values.clone()
        key = (piece.key, piece.begin)
        buffer = self._pinned.get(key)
        if buffer is None or buffer.shape != piece.values.shape:
            buffer = torch.empty(piece.values.shape, dtype=piece.values.dtype, pin_memory=True)
            self._pinned[key] = buffer
        return buffer.copy_(piece.values, non_blocking=True)


class BackgroundSave:
    """At most one save in flight.

    An error of the save is raised where all ranks wait for it together: before the next save, or at the end.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, save: Callable[[], None]) -> None:
        """Run ``save`` in a thread; nothing may be in flight."""
        if self._thread is not None:
            raise RuntimeError("a save is in flight; wait for it first")
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.start()

    def _run(self, save: Callable[[], None]) -> None:
        try:
            save()
        except (SaveFailedError, OSError, RuntimeError) as error:
            self._error = error

    def wait(self) -> float:
        """Wait for the save in flight, if any; returns the seconds that took.

        Raises:
            SaveFailedError: the save failed.
        """
        if self._thread is None:
            return 0.0
        start = time.monotonic()
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error if isinstance(error, SaveFailedError) else SaveFailedError(str(error))
        return time.monotonic() - start
