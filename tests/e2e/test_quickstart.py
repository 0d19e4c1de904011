"""examples/quickstart.py: what it cannot use is one line and exit code 2; a launch that fails is explained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples import quickstart

TEXT = "a line of text to train on\n" * 1000


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        quickstart.main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        ("folder", "Is a directory"),
        (b"", "0 characters in all, and training needs 20000 or more"),
        (b"\xff\xfe", "not UTF-8 text (byte 0: invalid start byte)"),
    ],
)
def test_text_that_cannot_be_used(
    content: bytes | str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert refusal(capsys, "--text", str(path), "--out", str(tmp_path / "out")) == f"error: --text {path}: {reason}"
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = tmp_path / "text", tmp_path / "file"
    text.write_text(TEXT)
    file.write_text("")
    line = refusal(capsys, "--text", str(text), "--out", str(file))
    assert line.startswith(f"error: --out {file}: ")
    assert line.endswith("cannot be made: Not a directory")


def test_one_file_gives_documents_to_validate_on_and_nothing_is_lost(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    documents = quickstart.own_text([str(text)])
    assert len(documents) >= quickstart.DOCUMENTS
    assert "".join(documents) == TEXT


def test_a_command_that_fails_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "print('error: configuration refused, 1 problem:\\n  1. given x'); print('noise\\n' * 99); exit(2)"
    with pytest.raises(SystemExit) as ended:
        quickstart.run([sys.executable, "-c", program], tmp_path / "log")
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "error: configuration refused, 1 problem:\n  1. given x\n" in said
    assert "FAILED (exit 2)" in said
    assert "noise\nnoise" not in said
