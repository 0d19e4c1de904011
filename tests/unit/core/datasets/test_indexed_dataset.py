"""Token files: the bytes of the format, what comes back, merging, and every kind of damage named."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets.index_format import write_index
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, token_dtype
from tests.support.data import write_documents

DOCUMENTS = ([5, 6, 7], [8], [], [9, 10, 11, 12])


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_documents(str(tmp_path / "d"), DOCUMENTS)
    return str(tmp_path / "d")


def test_bytes_are_the_format(prefix: str, tmp_path: Path):
    write_documents(str(tmp_path / "u16"), DOCUMENTS, vocab_size=100)
    for name, code, size, letter in (("d", 4, 4, "i"), ("u16", 8, 2, "H")):
        expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 3, 5)
        expected += struct.pack("<3i", 3, 1, 4) + struct.pack("<3q", 0, 3 * size, 4 * size)
        expected += struct.pack("<5q", 0, 1, 2, 2, 3)
        assert (tmp_path / f"{name}.idx").read_bytes() == expected
        assert (tmp_path / f"{name}.bin").read_bytes() == struct.pack(f"<8{letter}", *range(5, 13))


@pytest.mark.parametrize("mapped", [True, False])
def test_reads_back(prefix: str, mapped: bool):
    data = IndexedDataset(prefix, mmap_bin=mapped)
    assert [data[i].tolist() for i in range(len(data))] == [[5, 6, 7], [8], [9, 10, 11, 12]]
    assert data.get(2, 1).tolist() == [10, 11, 12]
    assert data.get(2, 1, 2).tolist() == [10, 11]
    assert data.get(2, 4).tolist() == []
    assert [data.document_of(i) for i in range(3)] == [0, 1, 3]
    assert data.num_tokens == 8
    for asked in ((2, 1, 4), (2, -1, 1), (2, 0, -1), (3,)):
        with pytest.raises(IndexError):
            data.get(*asked)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32), (65537, np.int32)])
def test_token_type_follows_the_vocabulary(vocab_size: int, dtype: type, tmp_path: Path):
    assert token_dtype(vocab_size) is dtype
    write_documents(str(tmp_path / "d"), [[0, vocab_size - 1]], vocab_size=vocab_size)
    data = IndexedDataset(str(tmp_path / "d"))
    assert data.dtype == dtype
    assert data[0].tolist() == [0, vocab_size - 1]


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path):
    with IndexedDatasetBuilder(str(tmp_path / "d"), np.uint16) as builder:
        for token in (65536, -1):
            with pytest.raises(ValueError, match="do not fit uint16"):
                builder.add_item([1, token])
        for token, kind in ((1.5, "float64"), (2.0, "float64"), (1 << 70, "object"), ("2", "str")):
            with pytest.raises(ValueError, match=f"tokens of type {kind}"):
                builder.add_item([token])
        with pytest.raises(ValueError, match="bool"):
            builder.add_document([True, False], [2])
        builder.add_item([])
        with pytest.raises(ValueError, match="add up to 3"):
            builder.add_document([1, 2], [3])
    assert list(tmp_path.iterdir()) == []


def test_offsets_are_summed_in_64_bits():
    file = io.BytesIO()
    write_index(file, np.int32, np.full(3, 2**30, np.int32), np.arange(4))
    assert np.frombuffer(file.getvalue(), "<i8", 3, 34 + 12).tolist() == [0, 2**32, 2**33]


def test_merge_equals_concatenation(tmp_path: Path):
    write_documents(str(tmp_path / "a"), [[1, 2], [3], [4, 5, 6]])
    write_documents(str(tmp_path / "empty"), [])
    with IndexedDatasetBuilder(str(tmp_path / "c")) as builder:
        for sequence in ([7], [8, 9], []):
            builder.add_item(sequence)
        builder.end_document()
        builder.finalize()
    with IndexedDatasetBuilder(str(tmp_path / "merged")) as builder:
        for name in ("a", "empty", "c"):
            builder.add_index(str(tmp_path / name))
        builder.add_document([10], [1])
        builder.finalize()
    with IndexedDatasetBuilder(str(tmp_path / "straight")) as builder:
        for document in ([[1, 2]], [[3]], [[4, 5, 6]], [[7], [8, 9], []], [[10]]):
            for sequence in document:
                builder.add_item(sequence)
            builder.end_document()
        builder.finalize()
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == (tmp_path / f"straight.{suffix}").read_bytes()
    merged = IndexedDataset(str(tmp_path / "merged"))
    assert merged.document_indices.tolist() == [0, 1, 2, 3, 6, 7]
    assert merged.document_of(5) == 3


def test_merge_refuses_another_token_type(tmp_path: Path):
    write_documents(str(tmp_path / "a"), [[1]], vocab_size=100)
    with IndexedDatasetBuilder(str(tmp_path / "b")) as builder, pytest.raises(ValueError, match="uint16"):
        builder.add_index(str(tmp_path / "a"))


def test_an_error_leaves_no_data_set(prefix: str, tmp_path: Path):
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError), IndexedDatasetBuilder(prefix) as builder:
        builder.add_item([1])
        raise ZeroDivisionError
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _patch(path: Path, offset: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


LENGTHS, POINTERS, BORDERS = 34, 34 + 12, 34 + 36
DAMAGE = {
    "no idx": (lambda i, b: i.unlink(), "d.idx: no such file"),
    "no bin": (lambda i, b: b.unlink(), "d.bin: no such file"),
    "a FIFO": (lambda i, b: (b.unlink(), os.mkfifo(b)), "d.bin: it is a FIFO, not a file"),
    "a folder": (lambda i, b: (i.unlink(), i.mkdir()), "d.idx: it is a directory, not a file"),
    "empty idx": (lambda i, b: i.write_bytes(b""), "d.idx: truncated"),
    "short header": (lambda i, b: _cut(i, 33), "d.idx: truncated"),
    "idx cut": (lambda i, b: _cut(i, 60), "d.idx: truncated"),
    "idx longer": (lambda i, b: i.write_bytes(i.read_bytes() + b"\0" * 8), "d.idx: overlong"),
    "modes": (lambda i, b: i.write_bytes(i.read_bytes() + b"\0" * 3), "d.idx: .*multimodal"),
    "bin cut": (lambda i, b: _cut(b, 31), "d.bin: truncated: 31 bytes, .*d.idx describes 32"),
    "bin longer": (lambda i, b: b.write_bytes(b.read_bytes() + b"\0\0\0\0"), "d.bin: overlong"),
    "foreign": (lambda i, b: i.write_bytes(b"TNTIDX\0\0" + bytes(100)), "d.idx: foreign"),
    "swapped": (lambda i, b: (i.rename(f"{i}.x"), b.rename(i), Path(f"{i}.x").rename(b)), "d.idx: (foreign|truncated)"),
    "version": (lambda i, b: _patch(i, 9, b"\2"), "d.idx: version 2"),
    "token type": (lambda i, b: _patch(i, 17, b"\x09"), "d.idx: token type code 9"),
    "floats": (lambda i, b: _patch(i, 17, b"\7"), "d.idx: holds float32"),
    "other type": (lambda i, b: _patch(i, 17, b"\x08"), "d.idx: sequence 1 starts at byte 12"),
    "huge count": (lambda i, b: _patch(i, 18, b"\xff" * 8), "d.idx: truncated"),
    "negative length": (lambda i, b: _patch(i, LENGTHS + 4, b"\xff" * 4), "d.idx: sequence 1 has the length -1"),
    "offset": (lambda i, b: _patch(i, POINTERS + 16, b"\0"), "d.idx: sequence 2 starts at byte 0"),
    "first border": (lambda i, b: _patch(i, BORDERS, b"\1"), "d.idx: document borders are 1..3"),
    "last border": (lambda i, b: _patch(i, BORDERS + 32, b"\2"), "d.idx: document borders are 0..2"),
    "border order": (
        lambda i, b: _patch(i, BORDERS + 8, b"\3"),
        r"d.idx: document border 2 \(2\) lies before border 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, prefix: str):
    damage, message = DAMAGE[kind]
    IndexedDataset(prefix)
    damage(Path(prefix + ".idx"), Path(prefix + ".bin"))
    with pytest.raises(DamagedInputError, match=message) as caught:
        IndexedDataset(prefix)
    assert caught.value.exit_code == 3


def test_index_of_another_data_set(prefix: str, tmp_path: Path):
    write_documents(str(tmp_path / "other"), [[1, 2, 3]])
    (tmp_path / "other.idx").rename(prefix + ".idx")
    with pytest.raises(
        DamagedInputError, match=r"d.bin: overlong: 32 bytes, .* describes 12; are the two of different"
    ):
        IndexedDataset(prefix)


def test_bin_that_shrinks_while_open(prefix: str):
    data = IndexedDataset(prefix, mmap_bin=False)
    with Path(prefix + ".bin").open("r+b") as file:
        file.truncate(18)
    with pytest.raises(DamagedInputError, match="d.bin: ends at byte 18, inside sequence 2"):
        data.get(2)


def test_missing_data_set_points_to_the_right_spelling(tmp_path: Path):
    write_documents(str(tmp_path / "c_text_document"), [[1]])
    with pytest.raises(DamagedInputError, match="there is a data set .*c_text_document"):
        IndexedDataset(str(tmp_path / "c"))
    with pytest.raises(DamagedInputError, match="there is a data set .*c_text_document$"):
        IndexedDataset(str(tmp_path / "c_text_document.bin"))
    with pytest.raises(DamagedInputError, match="there is a data set .*c_text_document$"):
        IndexedDataset(str(tmp_path))


def test_content_digest_has_no_path_in_it(prefix: str, tmp_path: Path):
    write_documents(str(tmp_path / "same"), DOCUMENTS)
    write_documents(str(tmp_path / "other"), DOCUMENTS[:2])
    digests = [IndexedDataset(str(tmp_path / name)).content_digest() for name in ("d", "same", "other")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("tokens", "at"), [(1000, 0), (1000, 517), (1000, 999), (600_000, 0), (600_000, 599_999)])
def test_content_digest_knows_tokens_of_equal_lengths_apart(tmp_path: Path, tokens: int, at: int):
    """All of a small file; of a large one its ends, and blocks between."""
    text = np.arange(tokens) % 50
    write_documents(str(tmp_path / "d"), [text])
    text[at] += 1
    write_documents(str(tmp_path / "changed"), [text])
    assert (
        IndexedDataset(str(tmp_path / "d")).content_digest()
        != IndexedDataset(str(tmp_path / "changed")).content_digest()
    )


def test_content_digest_knows_another_text_of_equal_lengths_apart(tmp_path: Path):
    digests = []
    for seed in (1, 2):
        write_documents(str(tmp_path / f"{seed}"), [np.random.default_rng(seed).integers(0, 50, 600_000)])
        digests.append(IndexedDataset(str(tmp_path / f"{seed}")).content_digest())
    assert digests[0] != digests[1]
