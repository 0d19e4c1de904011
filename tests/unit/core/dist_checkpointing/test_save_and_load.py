"""Tensors through a checkpoint folder: same bits back, nothing missing, nothing damaged, no code run."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.config.errors import DamagedInputError, SaveFailedError
from megatron.core.digest.bits import same_bits
from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup, name_ranks
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.facts import FACTS_FILE, FORMAT_VERSION, encode_facts, read_facts
from megatron.core.dist_checkpointing.flat_tensor import (
    FlatTensor,
    StoredPiece,
    TensorFacts,
    add_digests,
    digests_of,
    plain_piece,
    state_dict_of,
)
from megatron.core.dist_checkpointing.folder import iteration_folder, newest_iteration
from megatron.core.dist_checkpointing.load import load_pieces, require_same_tensors
from megatron.core.dist_checkpointing.reader import read_metadata
from megatron.core.dist_checkpointing.save import SaveRequest, delete_superseded, save_checkpoint
from megatron.core.dist_checkpointing.writer import METADATA_FILE, HashingFile
from megatron.core.process_groups.groups import Group

ALONE = CheckpointGroup(Group(axis="world", ranks=(0,), rank=0, handle=None), 1)
SHAPE, SHARDS = (6, 1000), 2
RUN = {
    "iteration": 4,
    "consumed_train_samples": 16,
    "consumed_valid_samples": 0,
    "schedule": {},
    "schedule_position": 16,
    "logical_layout": {},
    "physical_layout": {},
    "trajectory": {},
    "branches": [],
    "has_optimizer": True,
    "has_generators": True,
}


def whole() -> torch.Tensor:
    """The values of the tensor that is cut in these tests, with some that no arithmetic keeps."""
    values = torch.randn(6000, generator=torch.Generator().manual_seed(7))
    values[:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    return values


def cut(values: torch.Tensor, *borders: int) -> list[StoredPiece]:
    """The tensor in pieces that do not cross the border between its two shards, at 3000."""
    facts = TensorFacts(dtype="float32", shape=SHAPE, shards=SHARDS, name="layer.weight")
    edges = sorted({0, 3000, 6000, *borders})
    return [
        StoredPiece(key="main_params.layer.weight", facts=facts, begin=a, values=values[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def save(
    root: Path,
    iteration: int = 4,
    values: torch.Tensor | None = None,
    *borders: int,
) -> Path:
    """Save the tensor and some bytes."""
    pieces = cut(whole() if values is None else values, *borders)
    pieces.append(plain_piece("generators.rank_00000.python", torch.arange(5, dtype=torch.uint8)))
    request = SaveRequest(
        root=root,
        iteration=iteration,
        pieces=pieces,
        digests=digests_of(pieces),
        facts={**RUN, "iteration": iteration},
    )
    save_checkpoint(request, ALONE)
    return iteration_folder(root, iteration)


def load(folder: Path, *borders: int) -> torch.Tensor:
    """The tensor, read into pieces of another cut."""
    values = torch.zeros(6000)
    facts = read_facts(folder)
    load_pieces(folder, facts, cut(values, *borders), ALONE)
    return values


def test_other_cut_gets_the_same_bits(tmp_path: Path) -> None:
    folder = save(tmp_path, 4, None, 1024, 4024)
    assert same_bits(load(folder, 512, 2048, 5000), whole())
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", FACTS_FILE]


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a"), save(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 4, None, 1024)
    state = {"main_params.layer.weight": torch.zeros(6000)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same_bits(state["main_params.layer.weight"], whole())


def test_digest_does_not_depend_on_the_cut_and_sees_a_swap() -> None:
    one, other = digests_of(cut(whole())), digests_of(cut(whole(), 17, 4000))
    assert add_digests([one]) == add_digests([other])
    swapped = torch.cat([whole()[3000:], whole()[:3000]])
    assert digests_of(cut(swapped)) != one
    parts = [digests_of([piece]) for piece in cut(whole(), 100)]
    assert add_digests(parts) == add_digests([one])


def test_view_is_saved_without_the_storage_behind_it(tmp_path: Path) -> None:
    wide = torch.zeros(6_000_000)
    wide[:6000] = whole()
    folder = save(tmp_path, 4, wide[:6000])
    assert (folder / "__0_0.distcp").stat().st_size < 60_000


def test_values_are_written_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And read to where they belong: neither a save nor a load holds anything twice."""
    seen, write, fill = [], torch.save, EntryReader._fill

    def saving(values: torch.Tensor, file: HashingFile) -> None:
        seen.append(values.data_ptr())
        write(values, file)

    def filling(reader: EntryReader, file: io.FileIO, out: torch.Tensor) -> None:
        seen.append(out.data_ptr())
        fill(reader, file, out)

    monkeypatch.setattr(torch, "save", saving)
    monkeypatch.setattr(EntryReader, "_fill", filling)
    values, read = whole(), torch.zeros(6000)
    folder = save(tmp_path, 4, values, 1024)
    assert {values[at:].data_ptr() for at in (0, 1024, 3000)} <= {*seen}
    seen.clear()
    load_pieces(folder, read_facts(folder), cut(read, 1024), ALONE)
    assert {*seen} == {read[at:].data_ptr() for at in (0, 1024, 3000)}


def test_missing_extra_and_reshaped_tensors_are_another_model(tmp_path: Path) -> None:
    folder = save(tmp_path)
    facts, kinds = read_facts(folder), ("main_params",)
    good = cut(whole())
    require_same_tensors(folder, facts, good, ALONE, kinds)
    with pytest.raises(DamagedInputError, match="main_params.layer.weight is in the checkpoint and not in the model"):
        require_same_tensors(folder, facts, [], ALONE, kinds)
    more = [*good, plain_piece("main_params.other", torch.zeros(3))]
    with pytest.raises(DamagedInputError, match="main_params.other is in the model and not in the checkpoint"):
        require_same_tensors(folder, facts, more, ALONE, kinds)
    wide = [replace(piece, facts=replace(piece.facts, shape=(3, 2000))) for piece in good]
    with pytest.raises(DamagedInputError, match=r"float32\[6, 1000\] in 2 shards .* float32\[3, 2000\]"):
        require_same_tensors(folder, facts, wide, ALONE, kinds)


@pytest.mark.parametrize("place", [0, 0.3, 0.7, 0.999999])
@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA_FILE, FACTS_FILE])
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, name: str, place: float) -> None:
    folder = save(tmp_path)
    raw = bytearray((folder / name).read_bytes())
    raw[int(len(raw) * place)] ^= 0x04
    (folder / name).write_bytes(raw)
    with pytest.raises(DamagedInputError, match=name):
        load(folder)


def test_truncated_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedInputError, match=r"__0_0.distcp: \d+ bytes, \d+ were written"):
        load(folder)
    data.unlink()
    with pytest.raises(DamagedInputError, match="__0_0.distcp: no such file"):
        load(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA_FILE])
def test_a_fifo_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DamagedInputError, match=f"{name} cannot be read: it is a FIFO, not a file"):
        load(folder)


def test_a_damaged_description_is_said_in_our_words_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DCP logs the traceback of what goes wrong while it reads the description itself."""
    folder = save(tmp_path)
    (folder / METADATA_FILE).write_bytes(b"\x80")
    with pytest.raises(DamagedInputError, match=r"\.metadata: 1 bytes, \d+ were written"):
        load(folder)
    assert [said.message for said in caplog.records if said.levelno >= logging.WARNING] == []


def test_values_that_are_not_those_of_the_digest_are_refused(tmp_path: Path) -> None:
    """Control of the proof after the load: files that agree with themselves, but hold another tensor."""
    folder = save(tmp_path)
    facts = read_facts(folder)
    facts["tensors"]["main_params.layer.weight"]["digest"] = "0" * 32
    (folder / FACTS_FILE).write_bytes(encode_facts(facts))
    with pytest.raises(DamagedInputError, match="not the values that were saved"):
        load(folder)


@pytest.mark.parametrize("copy", [0, 1])
def test_one_bit_that_arrives_otherwise_is_found_in_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: int
) -> None:
    """The files are whole: what a rank reads of them is not."""
    folder, read = save(tmp_path), EntryReader.read

    def misread(reader: EntryReader, place: writer.Place, out: torch.Tensor, start: int = 0) -> None:
        read(reader, place, out, start)
        out[-1:].view(torch.int32).bitwise_xor_(1)

    wanted = [replace(piece, copy=copy) for piece in cut(torch.zeros(6000))]
    load_pieces(folder, read_facts(folder), wanted, ALONE)
    monkeypatch.setattr(EntryReader, "read", misread)
    with pytest.raises(DamagedInputError, match=r"not the values that were saved, .*: main_params.layer.weight"):
        load_pieces(folder, read_facts(folder), wanted, ALONE)


class Hostile:
    """Runs a function when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_no_code_runs_from_metadata(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DamagedInputError, match=r"builtins.exec"):
        read_metadata(folder)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(torch.nn.Linear))
    with pytest.raises(DamagedInputError, match="torch.nn"):
        read_metadata(folder)
    (folder / METADATA_FILE).write_bytes(pickle.dumps([1]))
    with pytest.raises(DamagedInputError, match="not the metadata"):
        read_metadata(folder)


def test_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    metadata = read_metadata(folder)
    next(iter(metadata.storage_data.values())).relative_path = "../other/__0_0.distcp"
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedInputError, match="outside its folder"):
        read_metadata(folder)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', "made by Megatron-LM or Megatron-Core"),
        (b"[]", "is not the metadata.json"),
        (b'{"sharded_backend": "torch_dist", "format": "x"}', "does not match|do not match its own digest"),
        (b"{", "is damaged"),
        (encode_facts({**RUN, "format_version": FORMAT_VERSION + 1}), f"reads megatron-bitwise {FORMAT_VERSION}$"),
        (encode_facts({**RUN, "iteration": "4"}), "iteration, tensors, files missing or of the wrong type"),
    ],
)
def test_folders_of_others_are_refused_by_name(tmp_path: Path, raw: bytes, expected: str) -> None:
    (tmp_path / FACTS_FILE).write_bytes(raw)
    with pytest.raises(DamagedInputError, match=expected):
        read_facts(tmp_path)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 20_000])
def test_full_disk_names_rank_and_file_and_keeps_the_checkpoint_before(tmp_path: Path, limit: int) -> None:
    save(tmp_path)
    with file_size_limit(limit), pytest.raises(SaveFailedError, match=r"rank 0: .*too large.*__0_0.distcp"):
        save(tmp_path, 8)
    with file_size_limit(limit), pytest.raises(SaveFailedError, match=r"too large.*still there.*another --save"):
        save(tmp_path, 4, whole() + 1)
    assert same_bits(load(iteration_folder(tmp_path, 4)), whole())
    save(tmp_path, 8)
    assert same_bits(load(iteration_folder(tmp_path, 8)), whole())


def test_much_is_written_as_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut is by size and alone: the same files every time, read by DCP alone, and each of them is checked."""
    monkeypatch.setattr(writer, "FILE_BYTES", 5000)
    borders = tuple(range(500, 6000, 500))
    first, second = (save(tmp_path / name, 4, None, *borders) for name in ("first", "second"))
    names = sorted(path.name for path in first.glob("*.distcp"))
    assert names == [f"__0_{number}.distcp" for number in range(5)]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    sizes = [(first / name).stat().st_size for name in names]
    assert max(sizes) < 2 * min(sizes)
    assert same_bits(load(first, 1000, 2500), whole())
    state = {"main_params.layer.weight": torch.zeros(6000)}
    dcp.load(state, checkpoint_id=str(first), no_dist=True)
    assert same_bits(state["main_params.layer.weight"], whole())
    raw = bytearray((first / names[3]).read_bytes())
    raw[len(raw) // 2] ^= 0x04
    (first / names[3]).write_bytes(raw)
    with pytest.raises(DamagedInputError, match=names[3]):
        load(first)


def open_files() -> int:
    """Files this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(
    ("nth", "name"), [(2, "__0_0.distcp"), (3, ".metadata"), (4, FACTS_FILE), (5, "iter_0000008.part")]
)
def test_disk_that_fails_when_synced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, name: str
) -> None:
    """A full or broken disk may take every write and say so at the end only."""
    save(tmp_path)
    calls, sync = [], os.fsync

    def failing(handle: int) -> None:
        calls.append(handle)
        if len(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    handles = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(SaveFailedError, match=f"rank 0: .*Input/output error.*{name}"):
            save(tmp_path, 8)
    assert open_files() == handles
    assert same_bits(load(iteration_folder(tmp_path, 4)), whole())
    save(tmp_path, 8)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), TypeError(0, "no bytes")])
def test_one_file_that_fails_while_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The save waits for the files that are begun, names the one that failed, and leaves no thread and no open file."""
    monkeypatch.setattr(writer, "FILE_BYTES", 5000)
    borders = tuple(range(500, 6000, 500))
    save(tmp_path, 4, None, *borders)
    finished, failed, write, finish = [], threading.Event(), writer.write_all, HashingFile.finish
    # What is not begun when the failure is known is not written at all.
    all_begun, begun = threading.Barrier(5), set()

    def failing(handle: int, raw: memoryview, path: Path) -> None:
        if path not in begun:
            begun.add(path)
            all_begun.wait(60)
        if path.name == "__0_2.distcp":
            failed.set()
            raise error
        assert failed.wait(60)
        write(handle, raw, path)

    def counting(file: HashingFile) -> dict[str, object]:
        facts = finish(file)
        finished.append(file.path.name)
        return facts

    handles = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", failing)
        patch.setattr(HashingFile, "finish", counting)
        with pytest.raises(SaveFailedError, match=f"rank 0: .*{error.args[1]}"):
            save(tmp_path, 8, whole() + 1, *borders)
    assert sorted(finished) == [f"__0_{number}.distcp" for number in (0, 1, 3, 4)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-file")]
    assert open_files() == handles
    assert same_bits(load(iteration_folder(tmp_path, 4)), whole())
    save(tmp_path, 8, whole() + 1, *borders)
    assert same_bits(load(iteration_folder(tmp_path, 8)), whole() + 1)


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (10, 10, 10), (1, 100, 1), (40,) * 9])
def test_every_entry_is_in_one_file(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 100)
    pieces = [plain_piece(f"generators.{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    items = [
        item for key, tensor in state_dict_of(pieces).items() for item in tensor.__create_write_items__(key, tensor)
    ]
    files = writer.cut_items(items)
    assert [item for file in files for item in file] == items
    assert all(files)
    assert len(files) <= max(1, -(-sum(sizes) // 100))


def test_a_kernel_that_takes_no_advice_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(writer, "WRITE_BACK_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", refusing)
    assert same_bits(load(save(tmp_path)), whole())


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 3)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert same_bits(load(save(tmp_path, 4)), whole())
    delete_superseded(tmp_path, 4, 2)
    words = f"warning: {iteration_folder(tmp_path, 3)} could not be deleted ([Errno 16] Device or resource busy"
    assert capsys.readouterr().err.startswith(words)
    assert newest_iteration(tmp_path) == 4


def test_root_that_is_a_file_fails_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(SaveFailedError, match="root"):
        save(tmp_path / "root")


def test_ranks_with_one_error_are_named_together() -> None:
    assert name_ranks([None, "disk full", None, "disk full", "no"]) == ["ranks 1, 3: disk full", "rank 4: no"]
    assert name_ranks([None, None]) == []


def test_flat_tensor_refuses_arithmetic() -> None:
    flat = FlatTensor(10, [(0, torch.zeros(4))])
    assert flat.detach().shape == (10,)
    with pytest.raises(TypeError, match="only some ranges"):
        flat.sum()
