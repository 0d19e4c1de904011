"""Entries are read where they lie: any range, several in one file, and nothing but values."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import same_bits
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.writer import Place

VALUES = torch.arange(5000, dtype=torch.float32)
OTHERS = torch.arange(333, dtype=torch.uint8)


def _write(path: Path) -> list[Place]:
    """Two entries behind a few bytes of something else."""
    places, content = [], io.BytesIO()
    content.write(b"abc")
    for tensor in (VALUES, OTHERS):
        start = content.tell()
        one = io.BytesIO()
        torch.save(tensor, one)
        content.write(one.getvalue())
        places.append(Place(relative_path=path.name, offset=start, length=content.tell() - start))
    path.write_bytes(content.getvalue())
    return places


def _read(
    folder: Path, place: Place, numel: int, dtype: torch.dtype, start: int = 0, nbytes: int | None = None
) -> torch.Tensor:
    out = torch.empty(numel, dtype=dtype)
    EntryReader(folder).read(place, out, start, nbytes=nbytes)
    return out


def test_any_range_of_any_entry(tmp_path: Path) -> None:
    first, second = _write(tmp_path / "file")
    assert same_bits(_read(tmp_path, first, 5000, torch.float32), VALUES)
    assert same_bits(_read(tmp_path, first, 17, torch.float32, 4983), VALUES[4983:])
    assert same_bits(_read(tmp_path, second, 333, torch.uint8), OTHERS)
    assert _read(tmp_path, second, 0, torch.uint8, 0).numel() == 0


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "no such file"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:9000]), "is damaged at byte 3"),
    "other": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is damaged at byte 3"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_names_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    first, _ = _write(path)
    damage, words = DAMAGE[kind]
    damage(path)
    with pytest.raises(DamagedInputError, match=f"{path}.*{words}"):
        _read(tmp_path, first, 5000, torch.float32)


def test_whatever_byte_is_flipped_no_other_error_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values have no check here, so a flip in them is no error; anywhere else it is one of damage, or harmless."""
    path = tmp_path / "file"
    torch.save(OTHERS, path)
    whole, damaged = path.read_bytes(), 0
    place = Place(relative_path="file", offset=0, length=len(whole))
    for at in range(len(whole)):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
            try:
                _read(tmp_path, place, 333, torch.uint8)
            except DamagedInputError:
                damaged += 1
    assert damaged > 100
    assert capsys.readouterr().err == ""


def test_more_values_than_there_are(tmp_path: Path) -> None:
    first, _ = _write(tmp_path / "file")
    with pytest.raises(DamagedInputError, match="20000 bytes of values, 20004 were expected"):
        _read(tmp_path, first, 1, torch.float32, 5000)


def test_fewer_values_than_all_there_are(tmp_path: Path) -> None:
    first, _ = _write(tmp_path / "file")
    assert same_bits(_read(tmp_path, first, 4999, torch.float32, 0), VALUES[:4999])
    for nbytes in (19996, 20004):
        words = f"20000 bytes of values, {nbytes} were expected"
        with pytest.raises(DamagedInputError, match=words):
            _read(tmp_path, first, 4999, torch.float32, 0, nbytes)
        with pytest.raises(DamagedInputError, match=words):
            EntryReader(tmp_path).locate(first, nbytes)


def test_where_the_values_begin(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first, second = _write(path)
    reader, raw = EntryReader(tmp_path), path.read_bytes()
    assert reader.locate(first, VALUES.nbytes) == raw.index(VALUES.numpy().tobytes())
    assert reader.locate(second, OTHERS.nbytes) == raw.index(OTHERS.numpy().tobytes())


def test_compressed_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", VALUES.numpy().tobytes())
    place = Place(relative_path="file", offset=0, length=path.stat().st_size)
    with pytest.raises(DamagedInputError, match="its values are compressed"):
        _read(tmp_path, place, 5000, torch.float32)
