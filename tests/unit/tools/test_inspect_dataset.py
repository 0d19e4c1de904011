"""The tool that shows what training would read."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.training.config.data import DataConfig
from megatron.training.data.provider import build_datasets
from tests.support.data import write_documents, write_self_data
from tools.command_line import run_tool
from tools.inspect_dataset import main

TOOL = Path(__file__).resolve().parents[3] / "tools" / "inspect_dataset.py"


def _shown(capsys, *arguments: str) -> dict:
    assert run_tool(main, (*arguments, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def _sha(numbers, dtype: str) -> str:
    return hashlib.sha256(np.array(numbers, dtype).tobytes()).hexdigest()


def test_published_vector_as_a_command(tmp_path: Path):
    """Lengths 5, 3, 7, 4 and seed 1234: the indices are those of Megatron-Core 0.16.1."""
    data = write_self_data(tmp_path, (5, 3, 7, 4))
    command = [sys.executable, str(TOOL), "--data-path", data.prefix, "--split", "1", "--seq-length", "4"]
    command += ["--seed", "1234", "--train-samples", "8", "--samples", "0,1,8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    rows = [(0, 0), (0, 4), (1, 1), (2, 2), (2, 6), (3, 3), (4, 2), (5, 1), (6, 2), (7, 2)]
    order = [2, 1, 2, 0, 0, 1, 3, 3]
    line = [data.token(d, p) for d in order for p in range((5, 3, 7, 4)[d])]
    assert shown == {
        "train": {
            "document_index": _sha(order, "<i4"),
            "sample_index": _sha(rows, "<i4"),
            "shuffle_index": _sha([6, 4, 0, 5, 3, 2, 8, 7, 1], "<u4"),
            "num_samples": 9,
            "samples": [line[4 * k : 4 * k + 5] for k in (6, 4, 1)],
        },
        "valid": None,
        "test": None,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["self.bin", "self.idx"]


def test_all_of_valid_and_test_unless_evaluation_is_described(tmp_path: Path, capsys):
    data = write_self_data(tmp_path, (41,) * 30)
    base = ("--data-path", data.prefix, "--split", "8,1,1", "--seq-length", "8")
    shown = _shown(capsys, *base, "--train-samples", "80", "--samples", "0,100")
    assert [s["num_samples"] for s in shown.values()] == [122, 15, 15]
    assert shown["valid"]["samples"][1] is None and len(shown["train"]["samples"][1]) == 9
    evaluation = ("--global-batch-size", "8", "--eval-iters", "3", "--eval-interval", "5")
    shown = _shown(capsys, *base, "--train-iters", "10", *evaluation)
    # (10 // 5 + 1) * 3 * 8 samples of 8 tokens take five epochs of 123 tokens.
    assert [s["num_samples"] for s in shown.values()] == [122, 76, 30]


def test_training_reads_what_is_shown(tmp_path: Path, capsys):
    data = write_self_data(tmp_path, tuple(range(30, 60)))
    shown = _shown(capsys, "--data-path", data.prefix, "--seq-length", "8", "--train-samples", "50", "--samples", "3,4")
    config = DataConfig(data_path=(data.prefix,))
    options = {"sequence_length": 8, "seed": 1234, "turn": "run", "meet": lambda wrong: wrong}
    train = build_datasets(config, None, sizes=(50, 0, 0), **options).train
    assert dict(train.index_digests).items() <= shown["train"].items()
    assert [train.raw(3).tolist(), train.raw(4).tolist()] == shown["train"]["samples"]


def test_raw_ids_keep_pads(tmp_path: Path, capsys):
    write_documents(str(tmp_path / "d"), [[5, 7, 5, 7, 7]])
    pad = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--null-tokenizer-pad-id", "7")
    base = ("--data-path", str(tmp_path / "d"), "--split", "1", "--seq-length", "4", "--train-samples", "1")
    assert _shown(capsys, *base, *pad, "--samples", "0")["train"]["samples"] == [[5, 7, 5, 7, 7]]


def test_blend_and_mock(tmp_path: Path, capsys):
    prefix = write_self_data(tmp_path, (41,) * 6).prefix
    words = ("0.3", prefix, "0.7", prefix)
    shown = _shown(capsys, "--train-data-path", *words, "--seq-length", "8", "--train-samples", "10")
    train = shown["train"]
    assert train["dataset_index"] == _sha([1, 0, 1, 1, 0, 1, 1, 0, 1, 1], "<i2")
    assert train["dataset_sample_index"] == _sha([0, 0, 1, 2, 1, 3, 4, 2, 5, 6], "<i8")
    assert [m["num_samples"] for m in train["members"]] == [30, 30]
    mock = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--samples", "1")
    shown = _shown(capsys, *mock, "--seq-length", "1024", "--train-samples", "8")
    assert max(shown["test"]["samples"][0]) < 50


def test_text_form(tmp_path: Path, capsys):
    prefix = write_self_data(tmp_path, (41,) * 6).prefix
    assert run_tool(main, ("--data-path", prefix, "--split", "1", "--seq-length", "8", "--train-samples", "3")) == 0
    out = capsys.readouterr().out
    assert "train: 30 samples" in out and "valid: no data: left out by --split" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--data-path", "{none}", "--train-samples", "3"), 3, "none.idx"),
        (("--data-path", "{d}"), 2, "--train-samples"),
        (("--data-path", "{d}", "--train-samples", "0"), 2, "at least 1"),
        (("--data-path", "{d}", "--train-iters", "3"), 2, "--global-batch-size"),
        (("--data-path", "{d}", "--train-samples", "3", "--samples", "1,x"), 2, "--samples 1,x"),
        (("--data-path", "{d}", "--train-samples", "3", "--samples", "30"), 2, "below 30"),
        (("--data-path", "{d}", "--train-samples", "3", "--split", "0,0,1"), 2, "no train data"),
        (("--data-path", "{d}", "--train-samples", "3", "--seed", "-1"), 2, "--seed"),
        (("--mock-data", "--train-samples", "3"), 2, "--tokenizer-type"),
        (("--train-samples", "3"), 2, "neither --data-path nor --mock-data"),
        (("--data-path", "{d}", "--train-samples", "3", "--tokenizer-type", "TikTokenizer"), 2, "--tokenizer-model"),
        (
            ("--data-path", "{d}", "--train-samples", "3", "--samples", "0", *("--tokenizer-type", "NullTokenizer")),
            2,
            "size",
        ),
    ],
)
def test_refused(tmp_path: Path, capsys, arguments, code, message):
    prefix = write_self_data(tmp_path, (41,) * 6, name="d").prefix
    paths = {"{d}": prefix, "{none}": str(tmp_path / "none")}
    words = [paths.get(word, word) for word in arguments]
    if "--split" not in words and "--mock-data" not in words:
        words += ["--split", "1"]
    assert run_tool(main, (*words, "--seq-length", "8", "--json")) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_id_outside_a_named_vocabulary(tmp_path: Path, capsys):
    write_documents(str(tmp_path / "d"), [[1] * 20, [600] * 20])
    words = ("--data-path", str(tmp_path / "d"), "--split", "1", "--seq-length", "30", "--train-samples", "1")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "512")
    assert run_tool(main, (*words, *null, "--samples", "0")) == 3
    assert "token id 600" in capsys.readouterr().err


def test_torch_is_not_loaded(tmp_path: Path):
    """Tools and the check of a command line start in a fraction of torch's import time."""
    script = "import sys, tools.inspect_dataset, tools.preprocess_data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=TOOL.parents[1], check=True)
