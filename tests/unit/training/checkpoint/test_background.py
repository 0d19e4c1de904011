"""One save in flight, errors where they are waited for, copies of one's own."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.core.config.errors import SaveFailedError
from megatron.core.dist_checkpointing.flat_tensor import plain_piece
from megatron.training.checkpoint.background import Background, Snapshots


def test_waits_for_the_one_in_flight() -> None:
    background, gate, done = Background(), threading.Event(), []
    assert background.wait() == 0.0

    def save() -> None:
        gate.wait(10)
        done.append(1)

    background.start(save)
    with pytest.raises(RuntimeError, match="in flight"):
        background.start(save)
    gate.set()
    assert background.wait() > 0.0
    assert done == [1]
    background.start(save)
    background.wait()
    assert done == [1, 1]


ERRORS = {
    SaveFailedError("rank 1: disk full"): SaveFailedError,
    RuntimeError("rank 1: disk full"): SaveFailedError,
    MemoryError("rank 1: disk full"): MemoryError,
}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_error_comes_up_at_the_next_wait_once(error: Exception) -> None:
    background = Background()

    def save() -> None:
        raise error

    background.start(save)
    with pytest.raises(ERRORS[error], match="rank 1: disk full"):
        background.wait()
    assert background.wait() == 0.0


def test_snapshot_does_not_follow_the_original() -> None:
    values = torch.arange(4.0)
    (piece,) = Snapshots().take([plain_piece("a", values)])
    values.zero_()
    assert piece.values.tolist() == [0.0, 1.0, 2.0, 3.0]
