"""Users' command lines in fresh processes: what they print and write, and how bad input ends."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.data import write_documents
from tests.support.launch import launch, launch_forked

MODEL = "--hybrid-layer-pattern 'ME*-' --global-batch-size 4"
LOG_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +2/ +8 \| consumed samples: +8 \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: +4 \| "
    r"lm loss: \d\.\d{6}E[+-]\d\d \| seq_load_balancing_loss: \d\.\d{6}E[+-]\d\d \| loss scale: 1\.0 \| "
    r"grad norm: \d+\.\d{3} \| num zeros: \d+ \| params norm: \d+\.\d{3} \| "
    r"number of skipped iterations: +0 \| number of nan iterations: +0 \|"
)


def test_two_ranks_train_and_leave_everything_a_user_looks_for(tmp_path: Path) -> None:
    done = launch(
        2,
        f"{MODEL} --tensor-model-parallel-size 2 --sequence-parallel --log-interval 1 --eval-interval 2 --eval-iters 1 "
        f"--exit-interval 2 --log-params-norm --log-num-zeros-in-grad --run-dir {tmp_path} "
        f"--tensorboard-dir {tmp_path}/tensorboard --fingerprint-dir {tmp_path}/fingerprint",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert LOG_LINE.search(done.stdout), done.stdout[-3000:]
    assert re.search(r" validation loss at iteration 2 \| lm loss value: ", done.stdout)
    assert "exiting program at iteration 2" in done.stdout
    assert "  tensor_model_parallel_size ...................... 2\n" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(m["kind"], m["iteration"]) for m in metrics] == [("train", 1), ("train", 2), ("valid", 2)]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {"trajectory", "launch"} <= manifest.keys()
    (machine,) = manifest["launch"]["machines"]
    assert {"host", "driver", "gpus", "topology", "container"} <= machine.keys()
    assert list((tmp_path / "tensorboard").glob("events.*"))
    names = {p.name for p in (tmp_path / "fingerprint").iterdir()}
    assert names == {"manifest.json", "fingerprint.jsonl", "rank_00000.jsonl", "rank_00001.jsonl"}
    assert len((tmp_path / "fingerprint" / "fingerprint.jsonl").read_text().splitlines()) == 2


def test_an_impossible_layout_is_refused_at_once_by_every_rank() -> None:
    start = time.monotonic()
    done = launch(2, f"{MODEL} --tensor-model-parallel-size 4 --num-attention-heads 6")
    assert time.monotonic() - start < 60, "somebody waited for a collective"
    block = done.stderr[done.stderr.index("configuration refused") :]
    assert "--tensor-model-parallel-size 4" in block
    assert "2 processes" in block
    assert block.count("configuration refused") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--hidden-sise 8", 2, ["--hidden-sise", "did you mean", "--hidden-size"]),
        ("--tp-comm-overlap", 2, ["--tp-comm-overlap"]),
        ("--data-path {0}/nowhere --mock-data", 2, ["--data-path", "--mock-data"]),
    ],
)
def test_refusals_come_before_torch(flags: str, code: int, words: list[str], tmp_path: Path) -> None:
    done = launch(1, f"{MODEL} {flags.format(tmp_path)}", environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == code, done.stderr
    loaded = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "megatron.training.setup.command_line" in loaded
    assert "torch" not in loaded
    for word in words:
        assert word in done.stderr


def _files(folder: Path) -> str:
    write_documents(str(folder / "data"), [np.arange(300) % 500 for _ in range(40)], vocab_size=600)
    return str(folder / "data")


def _plant_id_beyond(prefix: str) -> None:
    write_documents(prefix, [np.full(300, 600) if i == 7 else np.arange(300) for i in range(40)], vocab_size=1000)


@pytest.mark.parametrize("fault", ["missing", "truncated index", "truncated data", "foreign index", "id beyond"])
def test_damaged_data_ends_with_3_and_names_the_file(fault: str, tmp_path: Path) -> None:
    prefix = _files(tmp_path)
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    if fault == "missing":
        data.unlink()
    elif fault == "truncated index":
        index.write_bytes(index.read_bytes()[:-5])
    elif fault == "truncated data":
        data.write_bytes(data.read_bytes()[:-2])
    elif fault == "foreign index":
        index.write_bytes(b"SOMETHING" + index.read_bytes()[9:])
    else:
        _plant_id_beyond(prefix)
    flags = f"{MODEL} --split 100,0,0 --data-path {prefix} --data-cache-path {tmp_path}/cache --train-iters 60"
    without = ("--mock-data",)
    done = launch(1, flags, without=without) if fault == "missing" else launch_forked(flags, without=without)
    assert done.returncode == 3, done.stdout[-1500:] + done.stderr[-1500:]
    assert prefix in done.stderr
    assert ("hidden_size ...." in done.stdout) == (fault != "missing"), "what is missing is said before the settings"
    if fault == "id beyond":
        assert all(word in done.stderr for word in ("600", "document 7", "509")), done.stderr


@pytest.mark.timeout(240)
def test_an_id_beyond_the_vocabulary_stops_every_rank_by_itself(tmp_path: Path) -> None:
    """The launcher looks again only when all ranks have long ended, so it has none to kill. A rank that waited for
    another would wait ten minutes."""
    prefix = _files(tmp_path)
    _plant_id_beyond(prefix)
    done = launch(
        2,
        f"--hybrid-layer-pattern 'ME|*-' --pipeline-model-parallel-size 2 --global-batch-size 4 --split 100,0,0 "
        f"--data-path {prefix}",
        without=("--mock-data",),
        launcher=("--monitor-interval", "20"),
        timeout_s=230,
    )
    assert done.returncode == 1
    assert done.stderr.count("exitcode  : 3") == 2, done.stderr[-3000:]
    assert "Signal" not in done.stderr
    assert f"error on rank 0: {prefix}.bin: token id 600 at position 0 of document 7" in done.stderr
    assert "509 ids; change --data-path, or --tokenizer-type" in done.stderr
    assert f"error on rank 1: stopped at the data, as another rank did: rank 0: {prefix}.bin: token id" in done.stderr


def test_a_port_in_use_ends_quickly() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(busy.getsockname()[1])}
        start = time.monotonic()
        done = launch(1, MODEL, environment={**place, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert time.monotonic() - start < 60
    assert done.returncode not in (0, None)
    assert "in use" in done.stderr
