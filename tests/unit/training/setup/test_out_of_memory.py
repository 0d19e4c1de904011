"""Memory that is not there is one line, whoever says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron.training.config.run import RunConfig
from megatron.training.setup.command_line import exit_code_of
from megatron.training.setup.out_of_memory import out_of_memory
from tests.support.settings import given

HUGE = 1 << 57


@pytest.mark.parametrize(
    "ask",
    [
        lambda: np.empty(HUGE, np.uint8),
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: bytearray(HUGE),
    ],
    ids=["numpy", "torch", "python"],
)
def test_it_is_said_in_a_line(ask: Callable[[], object], capsys: pytest.CaptureFixture[str]):
    def body(_: RunConfig) -> None:
        ask()

    assert exit_code_of(body, given()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error on rank 0: out of memory") and "--dry-run says what a rank needs" in line


def test_of_a_gpu_by_the_name_of_its_error_and_nothing_else():
    assert "Tried to allocate" in out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert out_of_memory(RuntimeError("shape '[2]' is invalid")) is None
