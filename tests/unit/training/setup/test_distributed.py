"""Ranks that do not meet end with one line, not with a traceback."""

from __future__ import annotations

import socket

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.training.setup.distributed import start_process_group
from megatron.training.setup.environment import Launch


def test_a_meeting_place_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        launch = Launch(rank=0, world_size=2, master_port=port)
        with pytest.raises(ConfigError) as refused:
            start_process_group(launch, "gloo", torch.device("cpu"), 1)
    (problem,) = refused.value.problems
    assert problem.given.startswith(f"MASTER_ADDR=127.0.0.1 with MASTER_PORT={port} for rank 0 of 2 (")
    assert "in use" in problem.given and "\n" not in problem.given
    assert problem.change.startswith("MASTER_ADDR or MASTER_PORT")
