"""Where CUBLAS_WORKSPACE_CONFIG says nothing that would not hold without it."""

from __future__ import annotations

import os

import pytest
import torch

from megatron.training.setup.cublas_workspace import NAME, says_nothing_more, settle_workspace
from megatron.training.setup.environment import withdraw


@pytest.mark.parametrize(
    ("environment", "capability", "nothing_more"),
    [
        ({NAME: ":4096:8"}, (9, 0), True),
        ({NAME: ":16:8"}, (9, 0), False),
        ({NAME: ":4096:8"}, (8, 0), False),
        ({NAME: ":4096:2:16:8"}, (8, 0), False),
        ({}, (9, 0), False),
        ({}, (8, 0), False),
    ],
)
def test_says_nothing_more(environment: dict[str, str], capability: tuple[int, int], nothing_more: bool) -> None:
    assert says_nothing_more(environment, capability) is nothing_more


def test_stays_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ":4096:8")
    assert not settle_workspace(torch.device("cpu"))
    assert os.environ[NAME] == ":4096:8"


def test_withdrawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ":4096:8")
    withdraw(NAME)
    withdraw(NAME)
    assert NAME not in os.environ
