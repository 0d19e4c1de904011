"""From argv to a checked configuration: all problems in one block by the first rank, before torch, with exit code 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem, TrainingStoppedError
from megatron.core.dist_checkpointing.folder import MARKER_FILE
from megatron.training.config.run import RunConfig
from megatron.training.setup import command_line
from megatron.training.setup.command_line import exit_code_of, refuse, start_up
from tests.support.cpu_time import cpu_of_children_s
from tests.support.settings import SMALL, given

PROGRAM = (
    "import sys\nfrom megatron.training.setup.command_line import checked_config, exit_code_of\n"
    "config = checked_config(sys.argv[1:])\n"
    "assert not {'torch', 'triton', 'tokenizers'} & set(sys.modules)\n"
    "import os\nprint('workspace', os.environ.get('CUBLAS_WORKSPACE_CONFIG'))\n"
)


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv], env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def test_good_command_line_is_dumped_and_the_environment_completed():
    done = run(*SMALL, "--deterministic-mode", "--use-mcore-models")
    assert done.returncode == 0, done.stderr
    assert "  world_size ...................................... 1\n" in done.stdout
    assert "  ffn_hidden_size ................................. 256\n" in done.stdout
    assert done.stdout.endswith("workspace :4096:8\n")
    assert done.stderr.startswith("warning: --use-mcore-models has no effect: ")


def test_without_the_mode_the_environment_stays():
    assert run(*SMALL).stdout.endswith("workspace None\n")


def test_refusal_lists_flags_rules_and_environment_at_once_in_under_two_seconds():
    before = cpu_of_children_s()
    argv = [*SMALL, "--deterministic-mode", "--fp16", "--moe-router-topk", "9", "--lr", "x", "--hiden-size", "3"]
    done = run(*argv, CUBLAS_WORKSPACE_CONFIG="junk", NCCL_ALGO="Tree")
    assert cpu_of_children_s() - before < 2.0
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: configuration refused, 6 problems:\n")
    for word in (
        "--fp16",
        "--moe-router-topk 9",
        "--lr x",
        "--hiden-size",
        "CUBLAS_WORKSPACE_CONFIG=junk",
        "NCCL_ALGO",
    ):
        assert word in done.stderr


def test_other_ranks_are_silent_and_wait():
    start = time.monotonic()
    done = run(*SMALL, "--fp16", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert time.monotonic() - start > command_line.WAIT_S


def test_world_size_of_the_launcher_is_the_one_that_counts():
    done = run(*SMALL, "--tensor-model-parallel-size", "4", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert done.returncode == 2
    assert "2 processes with --tensor-model-parallel-size 4" in done.stderr
    assert start_up(SMALL, {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}).launch.world_size == 4


def test_wrong_launch_is_named_with_what_else_is_wrong():
    with pytest.raises(ConfigError) as caught:
        start_up([*SMALL, "--fp16"], {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert "--fp16" in str(caught.value) and "RANK=5 with WORLD_SIZE=2" in str(caught.value)


def test_misspelt_flag_is_not_reported_a_second_time_as_missing():
    argv = [word.replace("--hidden-size", "--hiden-size") for word in SMALL]
    with pytest.raises(ConfigError) as caught:
        start_up(argv, {})
    assert [problem.given for problem in caught.value.problems] == ["--hiden-size 64"]


def test_help_ends_well_and_other_ranks_stay_silent():
    done = run("--help")
    assert done.returncode == 0 and "--tensor-model-parallel-size N" in done.stdout
    assert run("--help", RANK="1", WORLD_SIZE="2").stdout == ""


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def ending(error: BaseException | None):
        def body(_: RunConfig) -> None:
            if error is not None:
                raise error

        return exit_code_of(body, given("--fingerprint-dir", f"{tmp_path}/fp", "--save", str(tmp_path)))

    assert ending(None) == 0
    assert ending(ConfigError([Problem("--x", "y", "--x")])) == 2
    assert ending(DamagedInputError("a.bin is cut off")) == 3
    assert ending(TrainingStoppedError("iteration 3: nan")) == 4
    assert "error on rank 0: a.bin is cut off" in capsys.readouterr().err
    assert ending(OSError(errno.ENOSPC, "No space left on device", "/other/metrics.jsonl")) == 1
    assert capsys.readouterr().err == "error on rank 0: [Errno 28] No space left on device: '/other/metrics.jsonl'\n"
    full = OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/fp/manifest.json")
    assert ending(full) == 1
    said = capsys.readouterr().err
    assert f"No space left on device: '{tmp_path}/fp/manifest.json'; change: make room there or" in said
    assert said.endswith("or another --fingerprint-dir\n")
    (tmp_path / MARKER_FILE).write_text("4")
    assert ending(full) == 1
    assert f"-dir; --load {tmp_path} goes on from the newest complete checkpoint" in capsys.readouterr().err
    assert ending(KeyboardInterrupt()) == 130
    assert "interrupted; --exit-signal-handler" in capsys.readouterr().err
    for other in (ZeroDivisionError(), OSError(errno.ENOSPC, "No space left"), OSError(errno.ENOENT, "none", "/x")):
        with pytest.raises(type(other)):
            ending(other)


def test_what_stops_all_ranks_is_said_by_the_first_while_the_others_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)

    def stopping(_: RunConfig) -> None:
        raise DamagedInputError("x.distcp: not its SHA-256")

    for rank, waits in (("0", []), ("1", [command_line.WAIT_S])):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        waited.clear()
        assert exit_code_of(stopping, RunConfig()) == 3
        assert waited == waits
        assert capsys.readouterr().err == f"error on rank {rank}: x.distcp: not its SHA-256\n"


def test_what_is_wrong_on_one_machine_only_is_said_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command_line, "WAIT_S", 0.0)
    error = ConfigError([Problem("X=1 in the environment", "0", "X")])
    assert refuse(error, 3, local=True) == 2
    assert capsys.readouterr().err.startswith("error on rank 3: configuration refused, 1 problem:\n")
    assert refuse(error, 3) == 2
    assert capsys.readouterr().err == ""
