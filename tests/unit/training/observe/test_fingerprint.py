"""Lines of a fingerprint: exact keys and hex floats, whole lines, checked instead of repeated."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError, TrainingStoppedError
from megatron.training.observe.fingerprint import (
    FINGERPRINT_FILE,
    KEYS,
    FingerprintFile,
    FingerprintWriter,
    StepRecord,
    differing_fields,
    rank_file,
    read_lines,
)
from tests.support.fingerprints import record


def write(path: Path, *records: StepRecord) -> FingerprintFile:
    file = FingerprintFile(path)
    for step in records:
        file.write(step)
    file.close()
    return file


def test_line_has_exactly_the_keys_and_hex_floats(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(7, lm_loss=5.436767578125, z_loss=None))
    line = json.loads(path.read_text())
    assert tuple(line) == KEYS == (
        "iteration", "consumed_samples", "lm_loss", "load_balancing_loss", "z_loss", "mtp_1_loss", "grad_norm",
        "learning_rate", "params", "main_params", "exp_avg", "exp_avg_sq", "rng", "data",
    )  # fmt: skip
    assert line["iteration"] == 7 and line["consumed_samples"] == 56
    assert line["lm_loss"] == "0x1.5bf4000000000p+2"
    assert float.fromhex(line["learning_rate"]) == 1e-3
    assert line["z_loss"] is None and line["mtp_1_loss"] is None
    assert line["params"] == f"{7:032x}"


def test_depths_of_prediction_have_keys_of_their_own():
    line = record(1, mtp_losses=(1.0, 2.0)).line()
    assert (line["mtp_1_loss"], line["mtp_2_loss"]) == ((1.0).hex(), (2.0).hex())


def test_special_values_survive(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(1, lm_loss=math.nan, grad_norm=-0.0), record(2, lm_loss=math.inf))
    lines = read_lines(path)
    assert (lines[1]["lm_loss"], lines[1]["grad_norm"], lines[2]["lm_loss"]) == ("nan", "-0x0.0p+0", "inf")


def test_difference_needs_a_value_on_both_sides():
    left, right = record(1).line(), record(1, params="0" * 32, data=None, grad_norm=math.nextafter(1.5, 2)).line()
    assert list(differing_fields(left, right)) == ["grad_norm", "params"]
    assert differing_fields(left, record(1).line()) == {}
    assert list(differing_fields(record(1, grad_norm=0.0).line(), record(1, grad_norm=-0.0).line())) == ["grad_norm"]


def test_run_that_takes_over_checks_what_is_there_and_appends(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(1), record(2), record(3))
    before = path.read_bytes()
    write(path, record(2), record(3), record(4))
    assert path.read_bytes().startswith(before)
    assert list(read_lines(path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"), [("params", "f" * 32), ("lm_loss", 2.5000000000000004), ("consumed_samples", 17)]
)
def test_run_that_takes_over_is_stopped_by_a_difference(tmp_path: Path, field: str, value: object):
    path = tmp_path / "f.jsonl"
    write(path, record(1), record(2))
    before = path.read_bytes()
    file = FingerprintFile(path)
    file.write(record(1))
    with pytest.raises(TrainingStoppedError, match=rf"iteration 2 .*{field}: .* then, .* now") as caught:
        file.write(dataclasses.replace(record(2), **{field: value}))
    file.close()
    assert caught.value.exit_code == 4
    assert path.read_bytes() == before


def test_metrics_level_is_checked_against_a_full_line(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(1))
    write(path, record(1, params=None, main_params=None, exp_avg=None, exp_avg_sq=None, rng=None, data=None))
    assert read_lines(path)[1]["params"] is not None


def test_cut_off_last_line_is_repaired_by_the_writer_and_damage_for_a_reader(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(1), record(2))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedInputError, match=r"f\.jsonl: line 2, the last one, is cut off"):
        read_lines(path)
    write(path, record(2), record(3))
    assert list(read_lines(path)) == [1, 2, 3]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"iteration": 1}', json.dumps(record(2).line() | {"iteration": "2"}),
             json.dumps(record(2).line() | {"lm_loss": 1.5}), json.dumps(record(2).line() | {"iteration": True})],
)  # fmt: skip
def test_damaged_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "f.jsonl"
    write(path, record(1))
    path.write_text(path.read_text() + line + "\n" + json.dumps(record(3).line()) + "\n")
    for read in (read_lines, FingerprintFile):
        with pytest.raises(DamagedInputError, match=r"f\.jsonl: line 2 "):
            read(path)


def test_second_line_of_an_iteration_is_damage(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    write(path, record(1))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DamagedInputError, match="second line of iteration 1"):
        read_lines(path)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DamagedInputError, match=r"gone\.jsonl: no such file"):
        read_lines(tmp_path / "gone.jsonl")


def test_killed_writer_leaves_whole_lines(tmp_path: Path):
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tests.support.fingerprints import record\n"
        "from megatron.training.observe.fingerprint import FingerprintFile\n"
        "file = FingerprintFile(Path(sys.argv[1]))\n"
        "file.write(record(1)); file.write(record(2))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "f.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path.cwd(), check=False)
    assert done.returncode == -9
    assert list(read_lines(path)) == [1, 2]


def test_first_rank_keeps_both_files_and_others_their_own(tmp_path: Path):
    for rank in (0, 1):
        shared = FingerprintFile(tmp_path / FINGERPRINT_FILE) if rank == 0 else None
        with FingerprintWriter(tmp_path, shared, rank=rank, interval=2) as writer:
            assert [i for i in range(1, 5) if writer.wants(i)] == [2, 4]
            writer.write(record(2), record(2, params=f"{rank:032x}"))
            writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FINGERPRINT_FILE, rank_file(0), rank_file(1)]
    assert rank_file(1) == "rank_00001.jsonl"
    assert read_lines(tmp_path / rank_file(1))[2]["params"] == f"{1:032x}"
    assert read_lines(tmp_path / FINGERPRINT_FILE)[2]["params"] == f"{2:032x}"


def test_a_file_that_another_process_writes_is_refused_until_that_has_ended(tmp_path: Path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom megatron.training.observe.fingerprint import FingerprintFile\n"
        "file = FingerprintFile(Path(sys.argv[1]))\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    path = tmp_path / "f.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=r"--fingerprint-dir .*, whose f\.jsonl another process is writing"):
            FingerprintFile(path)
        other.kill()
    FingerprintFile(path).close()
