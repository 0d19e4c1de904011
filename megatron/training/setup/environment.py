"""The only file that touches ``os.environ``: who this process is among how many, and the variables others may set.

Ranks come from torchrun's variables, else from SLURM's (one task per process), else this is a run of one process.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.numbers import MOST_RANKS, WHOLE_NUMBER, shortened, whole_number

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the launcher says about this process.

    ``local_rank`` counts the processes of one machine; ``source`` is ``torchrun``, ``slurm`` or ``single``. The first
    rank listens at ``master_addr:master_port``; ``named_by`` is the variable that the address of several ranks
    comes from, ``None`` where none is set.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_MASTER_PORT
    source: str = "single"
    named_by: str | None = None

    @property
    def address(self) -> str:
        """Where the ranks meet and who says so, for a message."""
        if self.named_by == "MASTER_ADDR":
            return f"MASTER_ADDR={self.master_addr}"
        by = "MASTER_ADDR is not set" if self.named_by is None else f"the first machine of {self.named_by}"
        return f"{self.master_addr} ({by})"


def read_environment() -> dict[str, str]:
    """A copy of the environment."""
    return dict(os.environ)


def export(values: Mapping[str, str]) -> None:
    """Set variables for this process and its children."""
    os.environ.update(values)


def withdraw(name: str) -> None:
    """Unset a variable for this process and its children; nothing where it is not set."""
    os.environ.pop(name, None)


def host_name() -> str:
    """Name of this machine."""
    return socket.gethostname()


class _Reader:
    """Reads whole numbers out of an environment and collects what is wrong with them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[Problem] = []

    def number(self, name: str, default: int | None = None) -> int | None:
        """The variable as a whole number; ``default`` where it is not set."""
        text = self.environment.get(name)
        if text is None:
            return default
        number = whole_number(text)
        if number is None:
            self.refuse(f"{name}={shortened(text)}", WHOLE_NUMBER, name)
        return number

    def refuse(self, given: str, needed: str, name: str) -> None:
        """Note a problem with a variable of the environment."""
        change = f"{name}, which the launcher sets"
        self.problems.append(Problem(f"{given} in the environment", needed, change, local=True))


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Who this process is.

    Raises:
        ConfigError: variables that are incomplete, are no numbers or contradict each other, each named.
    """
    reader = _Reader(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        launch = _from_torchrun(reader)
    elif "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        launch = _from_slurm(reader)
    else:
        launch = Launch(master_addr=environment.get("MASTER_ADDR", "127.0.0.1"), master_port=_port(reader))
    if reader.problems:
        raise ConfigError(reader.problems)
    return launch


def rank_or_zero(environment: Mapping[str, str]) -> int:
    """This process's rank, 0 where the environment does not say it in a usable way; for messages only."""
    text = environment.get("RANK", environment.get("SLURM_PROCID", "0"))
    return max(0, whole_number(text) or 0)


def _from_torchrun(reader: _Reader) -> Launch:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in reader.environment:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            reader.refuse(f"{other}={reader.environment[other]} without {name}", f"both {other} and {name}", name)
    rank, world = reader.number("RANK"), reader.number("WORLD_SIZE")
    local_world = reader.number("LOCAL_WORLD_SIZE", world)
    local = reader.number("LOCAL_RANK", reader.number("SLURM_LOCALID"))
    _check_ranks(reader, ("RANK", "WORLD_SIZE"), rank, world)
    if local is None and "LOCAL_RANK" not in reader.environment and world is not None:
        if world == 1:
            local = 0
        else:
            reader.refuse(f"WORLD_SIZE={world} without LOCAL_RANK", "the rank within this machine", "LOCAL_RANK")
    _check_ranks(reader, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, local_world)
    if world is not None and local_world is not None and local_world > world:
        reader.refuse(f"LOCAL_WORLD_SIZE={local_world} with WORLD_SIZE={world}", f"at most {world}", "LOCAL_WORLD_SIZE")
    if rank is not None and local is not None and local > rank:
        reader.refuse(f"LOCAL_RANK={local} with RANK={rank}", f"at most {rank}", "LOCAL_RANK")
    return _launch(reader, rank, world, local, "torchrun")


def _from_slurm(reader: _Reader) -> Launch:
    rank, world = reader.number("SLURM_PROCID"), reader.number("SLURM_NTASKS")
    local = reader.number("SLURM_LOCALID", 0 if world == 1 else None)
    _check_ranks(reader, ("SLURM_PROCID", "SLURM_NTASKS"), rank, world)
    if local is None and "SLURM_LOCALID" not in reader.environment:
        reader.refuse(f"SLURM_NTASKS={world} without SLURM_LOCALID", "the rank within this machine", "SLURM_LOCALID")
    if local is not None and rank is not None and not 0 <= local <= rank:
        reader.refuse(f"SLURM_LOCALID={local} with SLURM_PROCID={rank}", f"0 to {rank}", "SLURM_LOCALID")
    return _launch(reader, rank, world, local, "slurm")


def _check_ranks(reader: _Reader, names: tuple[str, str], rank: int | None, world: int | None) -> None:
    """A problem unless 0 <= rank < world."""
    if world is not None and not 1 <= world <= MOST_RANKS:
        reader.refuse(f"{names[1]}={world}", f"1 to {MOST_RANKS}", names[1])
    elif rank is not None and world is not None and not 0 <= rank < world:
        reader.refuse(f"{names[0]}={rank} with {names[1]}={world}", f"0 to {world - 1}", names[0])


def _launch(reader: _Reader, rank: int | None, world: int | None, local: int | None, source: str) -> Launch:
    """The launch; zeros stand where a problem was noted."""
    address, named_by = _master_address(reader.environment)
    return Launch(
        rank=rank or 0,
        world_size=world or 1,
        local_rank=local or 0,
        master_addr=address,
        master_port=_port(reader),
        source=source,
        named_by=named_by,
    )


def _port(reader: _Reader) -> int:
    port = reader.number("MASTER_PORT", DEFAULT_MASTER_PORT)
    if port is not None and not 0 < port < 2**16:
        reader.refuse(f"MASTER_PORT={port}", "1 to 65535", "MASTER_PORT")
    return port or DEFAULT_MASTER_PORT


def _master_address(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """MASTER_ADDR, else the first machine of SLURM's list, else this machine; with the variable that names it."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    name = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environment else "SLURM_NODELIST"
    host = first_host(environment.get(name, ""))
    return (host, name) if host else ("127.0.0.1", None)


def first_host(nodes: str) -> str:
    """The first machine of a list in SLURM's notation: ``gpu[003-007,9],login1`` -> ``gpu003``."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
