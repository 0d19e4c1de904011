"""The tool that joins data sets: the result is the inputs one after the other, and unfitting inputs are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tests.architecture.sources import ROOT
from tools.command_line import run_tool
from tools.merge_datasets import main, prefixes_of

Documents = list[list[list[int]]]

PARTS: dict[str, Documents] = {
    "a": [[[1, 2]], [[3]], [[4, 5, 6]]],
    "b": [],
    "c": [[[7], [8, 9]], []],
}
"""Documents of sequences of tokens: three documents; none; one of two sequences and one of none."""


def write(prefix: Path, documents: Documents, dtype: type[np.integer] = np.uint16) -> str:
    with IndexedDatasetBuilder(str(prefix), dtype) as builder:
        for sequences in documents:
            for sequence in sequences:
                builder.add_item(sequence)
            builder.end_document()
        builder.finalize()
    return str(prefix)


def read(prefix: Path) -> Documents:
    data = IndexedDataset(str(prefix))
    borders = data.document_indices.tolist()
    return [[data[i].tolist() for i in range(low, high)] for low, high in zip(borders, borders[1:], strict=False)]


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    (tmp_path / "in").mkdir()
    return [write(tmp_path / "in" / name, documents) for name, documents in PARTS.items()]


def test_merge_is_the_parts_in_order(parts: list[str], tmp_path: Path) -> None:
    assert main(["--input", *parts, "--output-prefix", str(tmp_path / "all")]) == 0
    assert read(tmp_path / "all") == PARTS["a"] + PARTS["b"] + PARTS["c"]
    assert main(["--input", *reversed(parts), "--output-prefix", str(tmp_path / "turned")]) == 0
    assert read(tmp_path / "turned") == PARTS["c"] + PARTS["b"] + PARTS["a"]


def test_a_pair_with_a_folder_of_its_name_is_the_pair(parts: list[str], tmp_path: Path) -> None:
    """Training leaves its indices there."""
    Path(parts[0]).mkdir()
    assert prefixes_of(parts, str(tmp_path / "all")) == parts


def test_folder_stands_for_its_pairs_by_name(parts: list[str], tmp_path: Path) -> None:
    for _ in range(2):  # the second time the output of the first lies in the folder
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/merge_datasets.py"), "--input", "in", "--output-prefix", "in/all"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "5 documents, 9 tokens (uint16)" in done.stdout
    assert read(tmp_path / "in/all") == PARTS["a"] + PARTS["b"] + PARTS["c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "{a}", "{none}"), "no {none}.bin"),
        (("--input", "{a}", "{a}"), "every data set once"),
        (("--input", "{empty}"), "a folder that holds .bin and .idx files"),
        (("--input", "{half}"), "no {half}/h.idx"),
        (("--input", "{a}", "{wide}"), "which holds int32 tokens; needed: uint16"),
        (("--input", "{a}", "--multimodal"), "data sets of text"),
    ],
)
def test_refused(
    parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    for folder in ("empty", "half"):
        (tmp_path / folder).mkdir()
    (tmp_path / "half/h.bin").write_bytes(b"")
    places = {name: str(tmp_path / name) for name in ("none", "empty", "half", "wide")} | {"a": parts[0]}
    write(tmp_path / "wide", PARTS["a"], np.int32)
    words = [word.format(**places) for word in arguments]
    assert run_tool(main, [*words, "--output-prefix", str(tmp_path / "out")]) == 2
    assert message.format(**places) in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_output_may_not_be_an_input(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(main, ["--input", *parts, "--output-prefix", parts[1]]) == 2
    assert "a prefix that is no input" in capsys.readouterr().err


def test_damaged_input_is_named(parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in/c.bin").write_bytes(b"\0\0")
    assert run_tool(main, ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out")]) == 3
    assert "c.bin: truncated" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
