"""The example scripts: their flags are accepted, their models are those they name, and the batch file's way back into
the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.training.cli.parser import parse
from megatron.training.config.resolve import resolve_vocabulary
from megatron.training.config.run import RunConfig
from megatron.training.config.validate import resolve_and_validate
from megatron.training.loop.dry_run import parameter_counts
from tests.architecture.sources import ROOT

PRINT = r"printf %s\n"
"""In place of a launcher: the command line, a word a line."""


def arguments_of(script: str, *more: str, **environment: str) -> list[str]:
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), *more],
        env={"PATH": os.environ["PATH"], "LAUNCHER": PRINT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    program, *arguments = done.stdout.splitlines()
    assert program == "pretrain_hybrid.py"
    return arguments


def config_of(script: str, world_size: int, **environment: str) -> RunConfig:
    parsed = parse(arguments_of(script, **environment))
    assert parsed.problems == ()
    assert parsed.notes == ()
    return resolve_and_validate(parsed.config, world_size)


@pytest.mark.parametrize(
    ("script", "world_sizes"),
    [
        ("tiny_cpu.sh", (1, 2, 4, 8)),
        ("real_text.sh", (2, 4, 8)),
        ("nemotron3_nano_proxy.sh", (1, 2, 4)),
        ("nemotron3_nano.sh", (8, 64, 512)),
    ],
)
def test_flags_are_accepted_without_a_warning(script: str, world_sizes: tuple[int, ...]) -> None:
    data = {"DATA": "prefix"} if script == "real_text.sh" else {}
    for world_size in world_sizes:
        config = config_of(script, world_size, **data)
        assert config.numerics.deterministic_mode
        stages = config.parallel.pipeline_model_parallel_size
        assert config.parallel.logical_data_parallel_size == world_size // stages


@pytest.mark.parametrize(
    ("script", "world_size", "parameters"),
    [("nemotron3_nano_proxy.sh", 1, 3_019_928_064), ("nemotron3_nano.sh", 8, 31_577_937_344)],
)
def test_models_are_those_of_the_name(script: str, world_size: int, parameters: int) -> None:
    config = config_of(script, world_size)
    vocabulary = config.tokenizer.vocab_size
    padded = resolve_vocabulary(config, vocabulary)
    assert sum(part.total for part in parameter_counts(padded, vocabulary, world_size)) == parameters


def test_proxy_has_four_micro_batches_on_any_number_of_gpus() -> None:
    for gpus in (1, 2):
        training = config_of("nemotron3_nano_proxy.sh", gpus, GPUS=str(gpus)).training
        assert training.global_batch_size == 4 * gpus * training.micro_batch_size


def test_own_data_and_further_flags() -> None:
    words = arguments_of("nemotron3_nano.sh", "--lr", "1e-3", DATA="corpus", TOKENIZER="t.json")
    config = parse(words).config
    assert (config.data.data_path, config.tokenizer.tokenizer_model, config.optimizer.lr) == (
        ("corpus",),
        "t.json",
        1e-3,
    )
    assert not config.data.mock_data
    with pytest.raises(subprocess.CalledProcessError) as failed:
        arguments_of("nemotron3_nano.sh", DATA="corpus")
    assert "the tokenizer.json that DATA was made with" in failed.value.stderr


# SLURM's commands as far as the batch file uses them: a step is a child, a signal to the steps goes to that child.
COMMANDS = {
    "srun": 'echo $$ >step.pid\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n',
    "scancel": 'echo "scancel $*" >>calls\nkill -TERM "$(cat step.pid)"\n',
    "scontrol": 'echo "scontrol $*" >>calls\n',
}
RECIPE = 'trap "echo saved >>calls; exit 0" TERM\necho "$@" >>calls\ntouch started\n'


def job(folder: Path, recipe: str) -> subprocess.Popen[str]:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, text in COMMANDS.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{text}")
        (bin_folder / name).chmod(0o755)
    (folder / "recipe.sh").write_text(RECIPE + recipe)
    return subprocess.Popen(
        ["bash", str(ROOT / "examples/slurm/train.sbatch"), "run", "recipe.sh", "--lr", "1"],
        cwd=folder,
        env={
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "here",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path} did not appear")


def test_job_whose_time_is_up_saves_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    process = job(tmp_path, "while true; do sleep 0.05; done\n")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    flags, *calls = (tmp_path / "calls").read_text().splitlines()
    assert flags.startswith("--save run/checkpoints --load run/checkpoints")
    assert flags.endswith("--lr 1")
    assert calls == ["scancel --signal=TERM 7", "saved", "scontrol requeue 7"]


@pytest.mark.parametrize("code", [0, 2, 4])
def test_job_that_ends_by_itself_is_not_put_back(tmp_path: Path, code: int) -> None:
    process = job(tmp_path, f"exit {code}\n")
    process.communicate(timeout=60)
    assert process.returncode == code
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_refusal_while_the_time_is_up_is_not_put_back(tmp_path: Path) -> None:
    process = job(tmp_path, 'trap "exit 3" TERM\ntouch ready\nwhile true; do sleep 0.05; done\n')
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert "requeue" not in (tmp_path / "calls").read_text()
