"""Ranks that do not meet end with one line, not with a traceback."""

from __future__ import annotations

import itertools
import socket
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.training.setup import distributed
from megatron.training.setup.distributed import start_process_group
from megatron.training.setup.environment import Launch


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves in the variables goes with it."""
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_a_meeting_place_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(rank=0, world_size=2, master_port=port, named_by="MASTER_ADDR")
        with pytest.raises(ConfigError) as refused:
            start_process_group(launch, "gloo", torch.device("cpu"), 1)
    (problem,) = refused.value.problems
    assert problem.given.startswith(f"MASTER_ADDR=127.0.0.1 with MASTER_PORT={port} for rank 0 of 2 (")
    assert "in use" in problem.given and "\n" not in problem.given
    assert problem.needed == "a place where all 2 ranks meet within 1 minute"
    assert problem.change.startswith("MASTER_ADDR or MASTER_PORT")


@pytest.mark.parametrize(
    ("address", "waits"),
    [
        *(("no-such-host.invalid", True), ("node_7", True), ("m\u00fcnchen.invalid.", True)),
        *(("two..dots", False), ("", False), ("a" * 64, False), ("two words", False), ("node7:29500", False)),
        *(("http://node7", False), ("10.0.0.256", False), ("fe80::g", False), ("node[1-4]", False)),
    ],
)
def test_an_address_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch, address: str, waits: bool) -> None:
    now = itertools.count(step=20.0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: unknown(host))
    monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    launch = Launch(rank=1, world_size=2, local_rank=1, master_addr=address, source="torchrun", named_by="MASTER_ADDR")
    with pytest.raises(ConfigError) as refused:
        start_process_group(launch, "gloo", torch.device("cpu"), 1)
    (problem,) = refused.value.problems
    assert problem.given.startswith(f"MASTER_ADDR={address} for rank 1 of 2 (")
    assert (problem.change.partition(";")[0], problem.local) == ("MASTER_ADDR", True)
    assert next(now) == (80.0 if waits else 40.0)


def unknown(host: str) -> None:
    """As ``getaddrinfo`` with nobody to ask."""
    host.encode("idna")
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_becomes_known_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([socket.gaierror(socket.EAI_NONAME, "unknown"), socket.gaierror(socket.EAI_AGAIN, "busy"), None])

    def look_up(*_: object, **__: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(distributed.time, "sleep", lambda _: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    launch = Launch(rank=0, world_size=2, master_addr="soon", source="torchrun", named_by="MASTER_ADDR")
    assert start_process_group(launch, "gloo", torch.device("cpu"), 1) == "gloo"
    said = "trying for 60 s: a machine that is starting gets its name late"
    assert capsys.readouterr().err == f"warning: MASTER_ADDR=soon for rank 0 of 2 (unknown); {said}\n"


@pytest.mark.parametrize(("local_rank", "patience"), [(0, 0.0), (1, 0.0), (0, 600.0)])
def test_ranks_that_wait_say_where_and_for_how_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: int, patience: float
) -> None:
    def meeting(*_: object, **__: object) -> None:
        """Takes until what is to be said is said; a long patience is left alone."""
        for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
            timer.join(None if patience == 0.0 else 0.0)

    monkeypatch.setattr(distributed, "PATIENCE_S", patience)
    monkeypatch.setattr(distributed.dist, "init_process_group", meeting)
    launch = Launch(rank=3, world_size=8, local_rank=local_rank, source="torchrun", named_by="MASTER_ADDR")
    assert start_process_group(launch, "gloo", torch.device("cpu"), 10) == "gloo"
    said = "rank 3 waits for all 8 ranks to meet at MASTER_ADDR=127.0.0.1 with MASTER_PORT=29500 within 10 minutes"
    assert capsys.readouterr().err == (f"warning: {said}\n" if (local_rank, patience) == (0, 0.0) else "")
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
