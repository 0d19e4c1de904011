"""The text of the examples: whole files of the library, in one order, without tests and packages."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from tools.python_text import library_texts, main


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of a few files, below a folder whose own name means nothing."""
    root = tmp_path / "test" / "lib"
    for name in ("b.py", "a/c.py", "a/tests/t.py", "test/t.py", "site-packages/p.py", "a/notes.txt", "data.bin"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name} \u00e9\n", "utf-8")
    (root / "empty.py").touch()
    (root / "latin.py").write_bytes(b"# \xe9 end")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_sources_and_texts_in_the_order_of_their_paths(library: Path) -> None:
    texts = list(library_texts(library))
    assert texts == ["# a/c.py \u00e9\n", "# a/notes.txt \u00e9\n", "# b.py \u00e9\n", "#  end"]


def test_file_holds_a_document_a_line_and_can_be_cut_short(library: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.jsonl"
    assert main([str(out)]) == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == list(library_texts(library))
    assert main([str(out), "--characters", "12"]) == 0
    assert len(out.read_text().splitlines()) == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory\n"
