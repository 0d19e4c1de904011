"""Work on checkpoints while training goes on: a private copy of the state, and one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class Background:
    """At most one piece of work in flight: a save, the deletion of old checkpoints behind one, or both.

    An error of a save is raised where all ranks wait for it together: before the next save, or at the end.
    """

    def __init__(self) -> None:
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; nothing may be in flight."""
        if self._work is not None:
            raise RuntimeError("something is in flight; wait for it first")
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work = pool.submit(work)
        pool.shutdown(wait=False)

    def wait(self) -> float:
        """Wait for what is in flight, if anything is; returns the seconds that took.

        Raises:
            SaveFailedError: the save failed. An error that no save is known to end with comes up as it is.
        """
        if self._work is None:
            return 0.0
        start = time.monotonic()
        error = self._work.exception()
        self._work = None
        if isinstance(error, (OSError, RuntimeError)) and not isinstance(error, SaveFailedError):
            raise SaveFailedError(str(error)) from error
        if error is not None:
            raise error
        return time.monotonic() - start
