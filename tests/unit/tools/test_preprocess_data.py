"""The tool that makes token files: what it writes, for any number of workers, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tools import preprocess_data
from tools.command_line import run_tool
from tools.merge_datasets import main as merge
from tools.preprocess_data import main

TOOL = Path(__file__).resolve().parents[3] / "tools" / "preprocess_data.py"
BYTES = ("--tokenizer-type", "ByteTokenizer")


def _lines(path: Path, objects) -> str:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects), "utf-8")
    return str(path)


def _run(tmp_path: Path, *arguments: str, prefix: str = "out") -> int:
    return run_tool(main, ("--output-prefix", str(tmp_path / prefix), *arguments))


def _documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    borders = data.document_indices.tolist()
    return [
        [int(t) for i in range(low, high) for t in data[i]] for low, high in zip(borders, borders[1:], strict=False)
    ]


def test_json_lines(tmp_path: Path):
    source = _lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": ""}, {"text": "\u00e9", "x": 1}])
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() + b"\n \n")
    assert _run(tmp_path, "--input", source, *BYTES) == 0
    assert _documents(tmp_path / "out_text_document") == [[97, 98], [], [0xC3, 0xA9]]
    assert IndexedDataset(str(tmp_path / "out_text_document")).dtype == np.uint16
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 2
    assert _run(tmp_path, "--input", source, "--append-eod", *BYTES, prefix="eod") == 0
    assert _documents(tmp_path / "eod_text_document") == [[97, 98, 256], [], [0xC3, 0xA9, 256]]


def test_a_byte_order_mark_before_json_is_no_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n{"text": "\xef\xbb\xbfc"}\n')
    assert _run(tmp_path, "--input", str(tmp_path / "a.jsonl"), *BYTES) == 0
    assert _documents(tmp_path / "out_text_document") == [[97, 98], [0xEF, 0xBB, 0xBF, 99]]


def test_plain_text_is_one_document_a_file(tmp_path: Path):
    for name, content in (("a.txt", b"one\r\ntwo\n"), ("b.py", b"x = 1\n"), ("c.rst", b"")):
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in ("a.txt", "b.py", "c.rst")]
    assert _run(tmp_path, "--input", *files, "--append-eod", *BYTES) == 0
    assert _documents(tmp_path / "out_text_document") == [[*b"one\r\ntwo\n", 256], [*b"x = 1\n", 256], []]


def test_several_keys(tmp_path: Path):
    source = _lines(tmp_path / "a.json", [{"q": "1 2", "a": "3"}, {"q": "4", "a": ""}])
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70000")
    assert _run(tmp_path, "--input", source, "--json-keys", "q", "a", *null) == 0
    assert _documents(tmp_path / "out_q_document") == [[1, 2], [4]]
    assert _documents(tmp_path / "out_a_document") == [[3], []]
    assert IndexedDataset(str(tmp_path / "out_q_document")).dtype == np.int32


def test_workers_change_nothing(tmp_path: Path):
    source = _lines(tmp_path / "a.jsonl", [{"text": f"document {i} " * (i % 17)} for i in range(400)])
    for workers in ("1", "2"):
        command = [sys.executable, str(TOOL), "--input", source, "--output-prefix", str(tmp_path / workers)]
        command += ["--workers", workers, "--append-eod", "--log-interval", "100", *BYTES]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "400 documents" in done.stdout
        assert "processed" in done.stderr
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{w}_text_document.{suffix}" for w in ("1", "2"))
        assert one.read_bytes() == two.read_bytes()
    expected = [[*f"document {i} ".encode() * (i % 17), 256] if i % 17 else [] for i in range(400)]
    assert _documents(tmp_path / "1_text_document") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nba\xffd", "a.txt: line 2: byte 3 of the line (0xff) is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', "a.jsonl: line 3: byte 11 of the line (0xe9) is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl: line 2: not JSON"),
        pytest.param("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "a.jsonl: line 2: not JSON", id="deep"),
        pytest.param("a.jsonl", b"1" * 5000, "a.jsonl: line 1: not JSON", id="long number"),
        ("a.jsonl", b'{"body": "a"}\n', 'a.jsonl: line 1: needs an object whose "text" is a text'),
        ("a.jsonl", b'{"text": 3}\n', 'a.jsonl: line 1: needs an object whose "text" is a text'),
        ("a.jsonl", b"[1]\n", "a.jsonl: line 1: needs an object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', 'a.jsonl: line 1: "text" holds half of a surrogate pair'),
        ("a.jsonl", b"\n", "no text in it"),
    ],
)
def test_damaged_input_is_named_with_its_line(tmp_path: Path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert _run(tmp_path, "--input", str(tmp_path / name), *BYTES) == 3
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_files_of_that_name_are_replaced_at_the_end_and_it_is_said(tmp_path: Path, capsys):
    """As Megatron's tool does it, but a run that ends early leaves them as they were."""
    assert _run(tmp_path, "--input", _lines(tmp_path / "a.jsonl", [{"text": "ab"}]), *BYTES) == 0
    assert "in place of" not in capsys.readouterr().out
    before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
    assert _run(tmp_path, "--input", _lines(tmp_path / "b.jsonl", [{"text": "cde"}, {}]), *BYTES) == 3
    assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
    assert _run(tmp_path, "--input", _lines(tmp_path / "c.jsonl", [{"text": "cde"}]), *BYTES) == 0
    assert "out_text_document.idx in place of those that were there" in capsys.readouterr().out
    assert _documents(tmp_path / "out_text_document") == [[*b"cde"]]


@pytest.mark.parametrize("tool", [main, merge])
def test_a_place_that_cannot_be_written_is_no_traceback(tmp_path: Path, capsys, tool):
    source = _lines(tmp_path / "a.jsonl", [{"text": "ab"}])
    assert _run(tmp_path, "--input", source, *BYTES) == 0
    more = ("--input", source, *BYTES) if tool is main else ("--input", str(tmp_path / "out_text_document"))
    assert run_tool(tool, (*more, "--output-prefix", "/proc/x")) == 2
    assert "--output-prefix /proc/x, where /proc cannot be written" in capsys.readouterr().err
    (tmp_path / "dir_text_document.idx").mkdir()
    prefix = str(tmp_path / ("dir" if tool is main else "dir_text_document"))
    assert run_tool(tool, (*more, "--output-prefix", prefix)) == 1
    assert f"error: [Errno 21] Is a directory: '{tmp_path}/dir_text_document.idx'" in capsys.readouterr().err


def test_damage_found_by_a_worker_process_ends_the_tool(tmp_path: Path, capsys):
    source = _lines(tmp_path / "a.jsonl", [{"text": "a"}] * 900 + [{"body": "a"}] + [{"text": "a"}] * 900)
    assert _run(tmp_path, "--input", source, "--workers", "2", *BYTES) == 3
    assert "a.jsonl: line 901: needs an object" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_numbers_outside_the_vocabulary_are_named(tmp_path: Path, capsys):
    source = _lines(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": "1 512"}])
    assert _run(tmp_path, "--input", source, "--tokenizer-type", "NullTokenizer", "--vocab-size", "512") == 3
    assert "a.jsonl: line 2: id 512 is outside the vocabulary of 512" in capsys.readouterr().err


def test_all_problems_at_once(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("a")
    arguments = ("--input", str(tmp_path / "none"), str(tmp_path / "a.txt"), "--json-keys", "b", "b", "--workers", "0")
    assert _run(tmp_path / "no", *arguments) == 2
    error = capsys.readouterr().err
    for part in ("none", "--json-keys b b", "--workers 0", "no --tokenizer-type", "plain text file", "--output-prefix"):
        assert part in error
    assert "6 problems" in error


@pytest.mark.parametrize("flag", ["--tokenizer-typ", "--split-sentence"])
def test_unknown_or_shortened_flags_are_refused(tmp_path: Path, flag: str, capsys):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(SystemExit) as caught:
        _run(tmp_path, "--input", str(tmp_path / "a.txt"), *BYTES, flag)
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


def test_sentences_are_not_split(tmp_path: Path, capsys):
    source = _lines(tmp_path / "a.jsonl", [{"text": "a"}])
    assert _run(tmp_path, "--input", source, "--split-sentences", *BYTES) == 2
    assert "given --split-sentences; needed: documents as they are" in capsys.readouterr().err


def test_flags_without_effect_warn_and_change_nothing(tmp_path: Path, capsys):
    source = _lines(tmp_path / "a.jsonl", [{"text": letter} for letter in "abc"])
    assert _run(tmp_path, "--input", source, *BYTES) == 0
    assert "warning" not in capsys.readouterr().err
    flags = ("--partitions", "2", "--keep-sequential-samples")
    assert _run(tmp_path, "--input", source, *flags, *BYTES, prefix="same") == 0
    assert capsys.readouterr().err.count("warning: --") == 2
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{prefix}_text_document.{suffix}" for prefix in ("out", "same"))
        assert one.read_bytes() == two.read_bytes()


def test_document_longer_than_the_index_can_say_is_named(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preprocess_data, "MOST_TOKENS", 4)
    source = _lines(tmp_path / "a.jsonl", [{"text": "abcd"}, {"text": "abcde"}])
    assert _run(tmp_path, "--input", source, *BYTES) == 3
    assert "a.jsonl: line 2: 5 tokens, the index holds 4 in a document" in capsys.readouterr().err


def test_nothing_of_odd_text_is_lost(tmp_path: Path):
    """Line separators of Unicode, NUL, carriage returns, a last line without an end, one document of a megabyte."""
    texts = ["a\u2028b\u0085c", "\0", "x\r\ny\r", " ", "\n\n", "z" * (1 << 20), "\ufeffend"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), "utf-8")
    assert _run(tmp_path, "--input", str(path), *BYTES) == 0
    assert [bytes(ids).decode() for ids in _documents(tmp_path / "out_text_document")] == texts
