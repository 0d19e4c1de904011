"""The range of ids in a file: found by blocks, kept with the file's size and time, read again when either changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.index_cache import CacheEntry
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.token_range import RANGE_NAMES, require_ids_within
from tests.support.data import write_documents

DOCUMENTS = [[5, 4], [], [3, 70, 3, 70], [9]]


def _entry(dataset: IndexedDataset, folder: Path) -> CacheEntry:
    return CacheEntry(folder=folder, stem="s", description="d", content=dataset.file_digest(), names=RANGE_NAMES)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_documents(str(tmp_path / "d"), DOCUMENTS)
    (tmp_path / "cache").mkdir()
    return str(tmp_path / "d")


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_first_place_of_the_least_and_the_largest_id(prefix: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "_SCAN_TOKENS", block)
    data = IndexedDataset(prefix)
    assert data.id_range().tolist() == [[3, 2], [70, 3]]
    assert [data.place_of(token) for token in range(7)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert [data.document_of(sequence) for sequence in range(3)] == [0, 2, 3]


def test_a_file_that_changed_its_length_is_seen(prefix: str) -> None:
    data = IndexedDataset(prefix)
    Path(prefix + ".bin").write_bytes(b"\x01\x00\x00\x00")
    with pytest.raises(DamagedInputError, match=r"d\.bin: 1 tokens now, 7 when"):
        data.id_range()


def test_an_empty_file_has_no_ids(tmp_path: Path) -> None:
    write_documents(str(tmp_path / "d"), [])
    assert IndexedDataset(str(tmp_path / "d")).id_range().shape == (0, 2)


def test_range_is_read_once_and_again_for_other_tokens(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    scan = IndexedDataset.id_range
    monkeypatch.setattr(IndexedDataset, "id_range", lambda self: reads.append(self.name) or scan(self))

    def check(vocab_size: int = 71) -> int:
        data = IndexedDataset(prefix)
        require_ids_within(data, vocab_size, _entry(data, tmp_path / "cache"), "change it")
        return len(reads)

    assert [check(), check()] == [1, 1]
    with pytest.raises(DamagedInputError, match=r"d\.bin: token id 70 at position 1 of document 2 .* 70 ids; change"):
        check(70)
    # Other tokens in a file of the same size: only its time tells.
    content, before = Path(prefix + ".bin").read_bytes(), Path(prefix + ".bin").stat().st_mtime_ns
    Path(prefix + ".bin").write_bytes(content.replace(b"\x46\x00", b"\x47\x00"))
    os.utime(prefix + ".bin", ns=(before + 10, before + 10))
    with pytest.raises(DamagedInputError, match="token id 71"):
        check()
    assert len(reads) == 2
    assert check(72) == 2
    kept = tmp_path / "cache" / "s-token_range.npy"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert check(72) == 3


def test_negative_ids_are_outside(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "d"), np.int32) as builder:
        builder.add_document([1, -1, 2], [3])
        builder.finalize()
    data = IndexedDataset(str(tmp_path / "d"))
    with pytest.raises(DamagedInputError, match="token id -1 at position 1 of document 0"):
        require_ids_within(data, 10, _entry(data, tmp_path), "change it")


def test_a_folder_that_cannot_be_written_costs_a_reading(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    data = IndexedDataset(prefix)
    require_ids_within(data, 71, _entry(data, Path(prefix) / "nowhere"), "change it")
    assert "the next run reads" in caplog.text
