"""The index cache: complete or absent, checked, rebuilt when damaged or of other data."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.core.datasets.index_cache import CacheEntry, array_digest, cache_key

ARRAYS = {"a_index": np.arange(10, dtype=np.int32), "b_index": np.arange(6, dtype=np.uint32).reshape(3, 2)}


def _entry(folder: Path, content: str = "x") -> CacheEntry:
    return CacheEntry(folder=folder, stem="k-GPTDataset-train", description="d", content=content, names=tuple(ARRAYS))


def _equal(loaded) -> bool:
    same = [np.array_equal(loaded.arrays[n], a) and loaded.arrays[n].dtype == a.dtype for n, a in ARRAYS.items()]
    return all(same)


def test_digest_is_of_the_raw_values():
    array = np.arange(12, dtype=np.int32).reshape(6, 2)
    assert array_digest(array) == hashlib.sha256(array.tobytes()).hexdigest()
    assert array_digest(array.astype(">i4")) == array_digest(array)
    assert array_digest(np.asfortranarray(array)) == array_digest(array)
    assert array_digest(array[::2]) == hashlib.sha256(array[::2].tobytes()).hexdigest()
    assert array_digest(array[:0]) == hashlib.sha256().hexdigest()
    large = np.arange(5_000_000, dtype=np.int32)
    assert array_digest(large) == hashlib.sha256(large.tobytes()).hexdigest()


def test_key_is_the_md5_of_indented_json():
    key, text = cache_key({"class": "GPTDataset", "n": None, "m": [(0, 0.5), None]})
    assert key == hashlib.md5(text.encode()).hexdigest()
    assert text.startswith('{\n    "class": "GPTDataset",\n    "n": null,\n    "m": [\n        [\n            0,')


def test_stored_arrays_come_back(tmp_path: Path):
    entry = _entry(tmp_path)
    assert entry.load() is None
    stored = entry.store(ARRAYS)
    loaded = entry.load()
    assert loaded is not None and _equal(loaded) and loaded.digests == stored.digests
    names = ["a_index.npy", "b_index.npy", "checksums.json", "description.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"k-GPTDataset-train-{n}" for n in names]
    assert entry.load_or_build(lambda: pytest.fail("built again")).digests == stored.digests


def test_other_data_under_the_same_path_is_a_miss(tmp_path: Path):
    _entry(tmp_path, "old").store(ARRAYS)
    assert _entry(tmp_path, "new").load() is None
    _entry(tmp_path, "new").load_or_build(lambda: ARRAYS)
    assert _entry(tmp_path, "new").load() is not None


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": ("a_index.npy", _flip, "SHA-256 differs"),
    "truncated": ("b_index.npy", lambda p: p.write_bytes(p.read_bytes()[:-3]), "cannot be read"),
    "missing": ("b_index.npy", lambda p: p.unlink(), "cannot be read"),
    "not an array": ("a_index.npy", lambda p: p.write_bytes(b"hello"), "cannot be read"),
    "empty": ("a_index.npy", lambda p: p.write_bytes(b""), "cannot be read"),
    "another array": ("a_index.npy", lambda p: np.save(p, np.zeros(3)), "checksum file says otherwise"),
    "checksums": ("checksums.json", lambda p: p.write_bytes(b"{"), "not JSON"),
    "checksums of something else": ("checksums.json", lambda p: p.write_bytes(b'{"content": "x"}'), "does not list"),
    "checksums of no array": (
        "checksums.json",
        lambda p: p.write_bytes(p.read_bytes().replace(b'"dtype"', b'"dtxpe"')),
        "does not list",
    ),
    "checksums as names": (
        "checksums.json",
        lambda p: p.write_bytes(b'{"content": "content 1", "arrays": ["a_index", "b_index"]}'),
        "does not list",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_repaired(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    affix, damage, message = DAMAGE[kind]
    entry = _entry(tmp_path)
    entry.store(ARRAYS)
    damage(entry.path(affix))
    with pytest.raises(DamagedInputError, match=f"{affix}: .*{message}"):
        entry.load()
    with caplog.at_level(logging.WARNING):
        assert _equal(entry.load_or_build(lambda: ARRAYS))
    assert affix in caplog.text
    assert _equal(entry.load())


def test_a_store_that_dies_leaves_no_entry(tmp_path: Path):
    entry = _entry(tmp_path)
    entry.store(ARRAYS)
    unwritable = {**ARRAYS, "b_index": np.array([object()])}
    with pytest.raises((ValueError, TypeError)):
        entry.store(unwritable)
    entry.store(ARRAYS)
    entry.path("b_index.npy").unlink()
    entry.path("b_index.npy").mkdir()
    with pytest.raises(OSError, match="b_index"):
        entry.store(ARRAYS)
    assert entry.load() is None
    assert not [p for p in tmp_path.iterdir() if not p.name.endswith((".npy", ".txt", ".json"))]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_built(tmp_path: Path):
    (tmp_path / "file").touch()
    entry = _entry(tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="--data-cache-path"):
        entry.require_usable_folder()
    _entry(tmp_path / "new" / "cache").require_usable_folder()
    assert list((tmp_path / "new" / "cache").iterdir()) == []
