"""Start torch.distributed and pick the device."""

from __future__ import annotations

import contextlib
import datetime
import gc
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.parallel_state import destroy_model_parallel
from megatron.training.setup.environment import Launch, export

RESOLVE_S = 60.0
"""How long a name may take to become known, as that of a container that is still starting."""
PATIENCE_S = 15.0
"""How long ranks wait for each other without a word."""


def pick_device(backend: str | None, launch: Launch) -> torch.device:
    """The device of this rank: its GPU where there is one and the backend can use it, else the CPU.

    Raises:
        ConfigError: nccl without a GPU, or more local ranks than GPUs.
    """
    if not torch.cuda.is_available():
        if backend == "nccl":
            problem = Problem("--distributed-backend nccl on a machine without a GPU", "a GPU", "use gloo, or drop it")
            raise ConfigError([problem])
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count and backend != "gloo":
        problem = Problem(
            f"local rank {launch.local_rank} on a machine with {count} GPU{'s' * (count != 1)}",
            "one GPU per process",
            f"start at most {count} processes on this machine, or --distributed-backend gloo to share GPUs",
        )
        raise ConfigError([problem])
    return torch.device("cuda", launch.local_rank % count)


def start_process_group(launch: Launch, backend: str | None, device: torch.device, timeout_minutes: int) -> str:
    """Join the other ranks; nothing to do for a world of one. Returns the backend in use.

    The meeting place is put into the environment, which is where torch looks for it; torchrun has done so already.

    Raises:
        ConfigError: the ranks do not meet there.
    """
    name = backend or ("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size > 1:
        export({"MASTER_ADDR": launch.master_addr, "MASTER_PORT": str(launch.master_port)})
        _require_known_address(launch)
        place = f"{launch.address} with MASTER_PORT={launch.master_port}"
        within = f"within {timeout_minutes} minute{'s' * (timeout_minutes != 1)}"
        try:
            with _saying_that_it_waits(launch, f"all {launch.world_size} ranks to meet at {place} {within}"):
                dist.init_process_group(
                    name,
                    rank=launch.rank,
                    world_size=launch.world_size,
                    timeout=datetime.timedelta(minutes=timeout_minutes),
                    device_id=device if name == "nccl" else None,
                )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            reason = str(error).splitlines()[0]
            problem = Problem(
                f"{place} for rank {launch.rank} of {launch.world_size} ({reason})",
                f"a place where all {launch.world_size} ranks meet {within}",
                "MASTER_ADDR or MASTER_PORT, which the launcher sets, or start every rank",
            )
            raise ConfigError([problem]) from error
    return name


@contextlib.contextmanager
def _saying_that_it_waits(launch: Launch, what: str) -> Iterator[None]:
    """Where the block takes longer than ``PATIENCE_S``, the first rank of each machine says what it waits for."""
    words = f"warning: rank {launch.rank} waits for {what}"
    timer = threading.Timer(PATIENCE_S, print, [words], {"file": sys.stderr, "flush": True})
    if launch.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        if launch.local_rank == 0:
            timer.cancel()
            timer.join()


def _require_known_address(launch: Launch) -> None:
    """Wait until the meeting place's name is known here; torch would say so in a stack of its own, after its time-out.
    "No such name" may change: that is what a cluster's name server says of a machine that is still starting.

    Raises:
        ConfigError: it is still unknown after ``RESOLVE_S``, or it is no name.
    """
    give_up = time.monotonic() + (RESOLVE_S if _is_name(launch.master_addr) else 0.0)
    waiting = False
    while (reason := _why_unknown(launch.master_addr, launch.master_port)) is not None:
        given = f"{launch.address} for rank {launch.rank} of {launch.world_size} ({reason})"
        if time.monotonic() >= give_up:
            change = "MASTER_ADDR; for torchrun --master-addr, or --local-addr of the first machine with c10d"
            raise ConfigError([Problem(given, "a name or address that this machine can look up", change, local=True)])
        if not waiting and launch.local_rank == 0:
            words = f"trying for {RESOLVE_S:.0f} s: a machine that is starting gets its name late"
            print(f"warning: {given}; {words}", file=sys.stderr, flush=True)
        waiting = True
        time.sleep(1.0)


def _why_unknown(host: str, port: int) -> str | None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror
    except UnicodeError as error:
        return str(error)
    return None


def _is_name(host: str) -> bool:
    """Whether what cannot be looked up now may be a machine's name: ``http://a``, ``a:29500``, ``10.0.0.256`` never."""
    try:
        labels = host.encode("idna").decode().removesuffix(".").split(".")
    except UnicodeError:
        return False
    return all(re.fullmatch(r"[\w-]+", label) for label in labels) and not labels[-1].isdecimal()


def stop_process_group() -> None:
    """Leave, and end the groups' threads; safe to call when nothing was started. The caller must hold no run any more.
    Not for the end by an error: an exchange under way would be waited for, and the other rank may never come.

    The threads of a group end with its last reference, and torch drops but its own. One that wants the interpreter's
    lock, to free a tensor, while the interpreter ends is ended with the process ("terminate called without an active
    exception", SIGABRT), and a run that finished would be taken for one that failed. What a run is made of refers to
    itself in circles.
    """
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
