"""What is no file is left alone. Most of these tests would wait for ever where it is opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.facts import FACTS_FILE, file_problem, read_facts
from megatron.core.dist_checkpointing.folder import MARKER_FILE, find_checkpoint, newest_iteration, write_synced
from megatron.core.dist_checkpointing.reader import read_metadata
from megatron.core.dist_checkpointing.regular_file import open_regular, read_regular
from megatron.core.dist_checkpointing.stored import checkpoint_in
from megatron.core.dist_checkpointing.writer import METADATA_FILE, Place


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


OTHERS: dict[str, Callable[[Path], None]] = {
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def test_files_and_links_to_them_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"abc"
    with pytest.raises(FileNotFoundError), open_regular(tmp_path / "none"):
        pass


@pytest.mark.parametrize("kind", OTHERS)
def test_whoever_reads_of_a_checkpoint_names_what_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # A socket's path may have about 100 characters.
    monkeypatch.chdir(tmp_path)
    here = Path()
    for name in ("data", METADATA_FILE, MARKER_FILE, FACTS_FILE):
        OTHERS[kind](here / name)
    words = f"cannot be read: it is {kind}, not a file"
    assert file_problem(here, "data", {"bytes": 0, "sha256": ""}) == f"data {words}"
    reads: dict[str, Callable[[], object]] = {
        "data": lambda: EntryReader(here).locate(Place(relative_path="data", offset=0, length=9), 1),
        METADATA_FILE: lambda: read_metadata(here),
        MARKER_FILE: lambda: newest_iteration(here),
        FACTS_FILE: lambda: read_facts(here),
    }
    for name, read in reads.items():
        with pytest.raises(DamagedInputError) as caught:
            read()
        assert str(caught.value) == f"{name} {words}"


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_without_facts_says_what_is_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("iter_0000004")
    folder.mkdir()
    OTHERS[kind](folder / FACTS_FILE)
    with pytest.raises(DamagedInputError) as caught:
        checkpoint_in(folder)
    assert str(caught.value) == f"iter_0000004/metadata.json is {kind}, and there is no {MARKER_FILE}"
    Path(MARKER_FILE).write_text("4")
    with pytest.raises(DamagedInputError, match=rf"^iter_0000004 is not complete \(metadata.json is {kind}\), and "):
        find_checkpoint(Path())
    OTHERS[kind](Path("other"))
    with pytest.raises(DamagedInputError, match=rf"^other( is {kind}|/metadata.json is missing, and .*)$"):
        checkpoint_in(Path("other"))


def test_nobody_waits_for_a_reader_of_what_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "marker")
    with pytest.raises(OSError, match="marker"):
        write_synced(tmp_path / "marker", b"4")
