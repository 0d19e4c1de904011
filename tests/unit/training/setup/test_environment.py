"""Who this process is, from torchrun's or SLURM's variables; contradictions are named."""

from __future__ import annotations

import os

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.setup.environment import (
    Launch,
    export,
    find_launch,
    first_host,
    rank_or_zero,
    read_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


def test_nothing_set_is_one_process():
    assert find_launch({}) == Launch(
        rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=29500, source="single"
    )


def test_torchrun():
    assert find_launch(TORCHRUN) == Launch(
        rank=5,
        world_size=8,
        local_rank=1,
        master_addr="node7",
        master_port=1234,
        source="torchrun",
        named_by="MASTER_ADDR",
    )


def test_slurm_variables_alone_are_enough():
    nodes = {"SLURM_JOB_NODELIST": "gpu[003-004]"}
    found = find_launch({**SLURM, **nodes})
    assert found == Launch(
        rank=5, world_size=8, local_rank=1, master_addr="gpu003", source="slurm", named_by="SLURM_JOB_NODELIST"
    )
    assert found.address == "gpu003 (the first machine of SLURM_JOB_NODELIST)"
    assert find_launch({**SLURM, **nodes, "MASTER_ADDR": "a"}).address == "MASTER_ADDR=a"
    assert find_launch(SLURM).address == "127.0.0.1 (MASTER_ADDR is not set)"
    assert find_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1


def test_torchrun_inside_slurm_counts():
    assert find_launch({**TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}).rank == 5


def test_one_process_needs_no_local_rank():
    assert find_launch({"RANK": "0", "WORLD_SIZE": "1"}) == Launch(source="torchrun")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "8"}, "given RANK=8 with WORLD_SIZE=8 in the environment; needed: 0 to 7; change: RANK"),
        ({"RANK": "-1"}, "RANK=-1 with WORLD_SIZE=8"),
        ({"RANK": "five"}, "given RANK=five in the environment; needed: a whole number"),
        (
            {"RANK": "9" * 5000},
            f"given RANK={'9' * 40}... (5000 characters) in the environment; needed: a whole number",
        ),
        ({"WORLD_SIZE": "9" * 18}, "given WORLD_SIZE=999999999999999999 in the environment; needed: 1 to 1048576"),
        ({"RANK": None}, "WORLD_SIZE=8 without RANK"),
        ({"WORLD_SIZE": None}, "RANK=5 without WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"LOCAL_RANK": None}, "WORLD_SIZE=8 without LOCAL_RANK"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 with WORLD_SIZE=8"),
        ({"RANK": "0"}, "LOCAL_RANK=1 with RANK=0"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ],
)
def test_contradiction_is_named(changes: dict[str, str | None], expected: str):
    environment = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        find_launch(environment)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_NTASKS=8"),
        ({"SLURM_LOCALID": None}, "SLURM_NTASKS=8 without SLURM_LOCALID"),
        ({"SLURM_LOCALID": "6"}, "SLURM_LOCALID=6 with SLURM_PROCID=5"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS=many"),
    ],
)
def test_contradiction_of_slurm_is_named(changes: dict[str, str | None], expected: str):
    environment = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        find_launch(environment)
    assert expected in str(caught.value)


def test_all_contradictions_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        find_launch({**TORCHRUN, "RANK": "9", "LOCAL_RANK": "x", "MASTER_PORT": "0"})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 0), ({"RANK": "3"}, 3), ({"RANK": "x"}, 0), ({"RANK": "9" * 5000}, 0), ({"SLURM_PROCID": "2"}, 2)],
)
def test_rank_for_messages_never_fails(environment: dict[str, str], rank: int):
    assert rank_or_zero(environment) == rank


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[9,003-007]", "gpu9"),
        ("one", "one"),
        ("a1,a2", "a1"),
        ("rack2-n[01-02]-ib", "rack2-n01-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_list(nodes: str, host: str):
    assert first_host(nodes) == host


def test_export_reaches_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGATRON_BITWISE_TEST", "before")
    copy = read_environment()
    export({"MEGATRON_BITWISE_TEST": "after"})
    assert os.environ["MEGATRON_BITWISE_TEST"] == "after"
    assert copy["MEGATRON_BITWISE_TEST"] == "before"
