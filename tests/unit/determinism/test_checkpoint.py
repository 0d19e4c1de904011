"""checkpoint verify and diff, the tool that looks inside, and the script in the documentation."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.digest.bits import digest_hex
from megatron.core.dist_checkpointing import integrity, progress, writer
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup
from megatron.core.dist_checkpointing.digest_process import DigestProcess
from megatron.core.dist_checkpointing.facts import FACTS_FILE, encode_facts, read_facts
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, digests_of, plain_piece
from megatron.core.dist_checkpointing.folder import iteration_folder
from megatron.core.dist_checkpointing.save import SaveRequest, save_checkpoint
from megatron.core.dist_checkpointing.stored import StoredCheckpoint
from megatron.core.process_groups.groups import Group
from megatron.determinism import checkpoint
from megatron.determinism.__main__ import ended_by
from megatron.determinism.checkpoint import diff_checkpoints, main, verify_checkpoint
from megatron.determinism.report import Exit
from tools.checkpoint import inspect as tool
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[3]
ALONE = CheckpointGroup(Group(axis="world", ranks=(0,), rank=0, handle=None), 1)
WEIGHT = "main_params.layer.weight"
RUN = {
    "iteration": 4,
    "consumed_train_samples": 16,
    "consumed_valid_samples": 0,
    "step_count": 4,
    "schedule": {"max_lr": 0.1},
    "schedule_position": 16,
    "logical_layout": {"ldp": 1},
    "physical_layout": {"dp": 1},
    "trajectory": {},
    "branches": [],
    "has_optimizer": True,
    "has_generators": True,
}


def weights() -> torch.Tensor:
    return torch.arange(6000, dtype=torch.float32) / 7


def save(root: Path, values: torch.Tensor | None = None, more: dict[str, torch.Tensor] | None = None, **facts) -> Path:
    """A checkpoint of one tensor in two shards, cut at an odd place, and what else is given."""
    values = weights() if values is None else values
    about = TensorFacts(dtype="float32", shape=(6, 1000), shards=2, name="layer.weight")
    edges = (0, 1234, 3000, 6000)
    pieces = [
        StoredPiece(key=WEIGHT, facts=about, begin=a, values=values[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    pieces += [plain_piece(key, tensor) for key, tensor in (more or {}).items()]
    request = SaveRequest(root=root, iteration=4, pieces=pieces, digests=digests_of(pieces), facts={**RUN, **facts})
    save_checkpoint(request, ALONE)
    return iteration_folder(root, 4)


def test_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    outcome = verify_checkpoint(tmp_path)
    assert outcome.exit == Exit.SAME
    assert outcome.verdict.startswith("whole: 2 files and 1 tensors")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("place", [0.01, 0.25, 0.5, 0.75, 0.99])
def test_flipped_bit_is_named(tmp_path: Path, name: str, place: float) -> None:
    folder = save(tmp_path)
    raw = bytearray((folder / name).read_bytes())
    raw[int(len(raw) * place)] ^= 0x20
    (folder / name).write_bytes(raw)
    outcome = verify_checkpoint(tmp_path)
    assert outcome.exit == Exit.DIFFERENT
    assert outcome.facts["damaged_files"] == [name]
    assert any(name in line for line in outcome.details)


def test_whatever_byte_of_the_metadata_is_flipped_it_is_named(tmp_path: Path) -> None:
    path = save(tmp_path) / ".metadata"
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
        assert verify_checkpoint(tmp_path).facts["damaged_files"] == [".metadata"]


def test_what_takes_many_tensors_along_is_said_once(tmp_path: Path) -> None:
    folder = save(tmp_path, more={f"expert_bias.{n}": torch.zeros(2) for n in range(9)})
    (folder / ".metadata").write_bytes(b"\x80")
    outcome = verify_checkpoint(tmp_path)
    assert outcome.verdict.startswith("damaged: 1 of 2 files, 10 of 10 tensors")
    assert len(outcome.facts["damaged_tensors"]) == 10
    of_file, of_tensors = outcome.details
    assert "expert_bias.0, expert_bias.1, expert_bias.2 and 7 more tensors: " in of_tensors
    assert f"{folder / '.metadata'} is damaged" in of_tensors and ".metadata: 1 bytes" in of_file


def test_damaged_tensor_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    at = raw.index(weights()[4000:4100].numpy().tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert verify_checkpoint(tmp_path).facts["damaged_tensors"] == [WEIGHT]


def test_missing_and_extra_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "__0_0.distcp").rename(folder / "__7_0.distcp")
    outcome = verify_checkpoint(folder)
    assert outcome.facts["damaged_files"] == ["__0_0.distcp", "__7_0.distcp"]


def test_every_flipped_byte_of_the_facts_is_found(tmp_path: Path) -> None:
    path = save(tmp_path) / FACTS_FILE
    raw = path.read_bytes()
    for place in range(0, len(raw), 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x02]) + raw[place + 1 :])
        outcome = verify_checkpoint(tmp_path)
        assert outcome.exit == Exit.DIFFERENT, place
        assert FACTS_FILE in outcome.verdict


def test_damaged_facts_and_other_folders_are_no_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path)
    raw = (folder / FACTS_FILE).read_bytes()
    (folder / FACTS_FILE).write_bytes(raw.replace(b"16", b"17", 1))
    outcome = verify_checkpoint(folder)
    assert outcome.exit == Exit.DIFFERENT
    assert outcome.facts["damaged_files"] == [FACTS_FILE]
    assert FACTS_FILE in outcome.verdict
    assert diff_checkpoints(folder, folder).exit == Exit.DAMAGED
    outcome = verify_checkpoint(tmp_path / "nowhere")
    assert outcome.exit == Exit.DAMAGED
    assert outcome.verdict == f"not a checkpoint: {tmp_path / 'nowhere'} is missing"


def test_same_content_from_two_layouts(tmp_path: Path) -> None:
    generators = {"generators.rank_00000.python": torch.ones(3, dtype=torch.uint8)}
    save(tmp_path / "a", more=generators)
    save(tmp_path / "b", physical_layout={"dp": 2}, more={k: 2 * v for k, v in generators.items()})
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert outcome.exit == Exit.SAME, outcome
    assert any("generators are not compared" in line for line in outcome.details)
    save(tmp_path / "c", more={k: 2 * v for k, v in generators.items()})
    assert list(diff_checkpoints(tmp_path / "a", tmp_path / "c").facts["differences"]) == list(generators)


def test_first_differing_element_and_both_values(tmp_path: Path) -> None:
    save(tmp_path / "a")
    changed = weights()
    changed[3005], changed[5000] = 0.5, -1.0
    save(tmp_path / "b", changed)
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert outcome.exit == Exit.DIFFERENT
    text = outcome.facts["differences"][WEIGHT]
    assert text.startswith("2 of 6000 elements; first 5 of shard 1: ")
    assert "0x1.0000000000000p-1 (0.5) in B" in text


LONG = 1_400_003
"""Elements of a tensor that is compared in several parts, the last one odd."""


@pytest.mark.parametrize("threads", [1, 5])
def test_long_tensors_differ_in_what_all_their_parts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(checkpoint, "THREADS", threads)
    one = torch.arange(LONG, dtype=torch.float32)
    other = one.clone()
    other[[700_000, 700_001, LONG - 1]] = -1.0
    for name, values in (("a", one), ("b", other), ("c", one)):
        save(tmp_path / name, more={f"exp_avg.{key}": values for key in "xy"})
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    text = f"3 of {LONG} elements; first 700000 of shard 0: {one[700_000].item().hex()} (700000.0) in A, "
    assert outcome.facts["differences"] == {
        f"exp_avg.{key}": f"{text}-0x1.0000000000000p+0 (-1.0) in B" for key in "xy"
    }
    assert diff_checkpoints(tmp_path / "a", tmp_path / "c").exit == Exit.SAME


@pytest.mark.parametrize("small", [0, integrity.SMALL_BYTES])
@pytest.mark.parametrize("threads", [1, 5])
def test_what_is_damaged_does_not_depend_on_threads_and_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, small: int
) -> None:
    """Several files: one is gone, one has a flipped bit in the last part of a long tensor, one is cut short."""
    monkeypatch.setattr(integrity, "THREADS", threads)
    monkeypatch.setattr(integrity, "SMALL_BYTES", small)
    monkeypatch.setattr(writer, "FILE_BYTES", 1 << 20)
    long = torch.arange(LONG, dtype=torch.float32)
    folder = save(tmp_path / "a", more={f"exp_avg.{key}": long for key in "wxyz"})
    places = {key: StoredCheckpoint(folder).spans(f"exp_avg.{key}")[0].place for key in "wxyz"}
    assert len({place.relative_path for place in places.values()}) == 4
    assert verify_checkpoint(folder).exit == Exit.SAME
    gone, flipped, cut = (folder / places[key].relative_path for key in "wxy")
    gone.unlink()
    raw = flipped.read_bytes()
    at = raw.rindex(long[-9:].numpy().tobytes())
    flipped.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-5000])
    outcome = verify_checkpoint(folder)
    assert outcome.facts["damaged_files"] == sorted(path.name for path in (gone, flipped, cut))
    assert outcome.facts["damaged_tensors"] == [f"exp_avg.{key}" for key in "wxy"]
    assert outcome.details == (
        *(
            f"  {words}"
            for words in sorted(
                (
                    f"{gone}: no such file",
                    f"{cut}: {size - 5000} bytes, {size} were written",
                    f"{flipped}: its SHA-256 is not that of the file that was written",
                )
            )
        ),
        f"  exp_avg.w: {gone}: no such file",
        "  exp_avg.x: not the values that were saved",
        f"  exp_avg.y: {cut} is damaged at byte {places['y'].offset}: File is not a zip file",
    )
    save(tmp_path / "b", more={f"exp_avg.{key}": long for key in "wxyz"})
    for a, b in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")):
        assert diff_checkpoints(a, b).verdict == f"not a checkpoint: {gone}: no such file"


def test_every_byte_is_read_once_and_few_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify's files and a diff's values; what threads have in their hands does not grow with the checkpoint."""
    folder = save(tmp_path, more={"exp_avg.x": torch.arange(3 * LONG, dtype=torch.float32)})
    told, held, empty = [], [], torch.empty
    monkeypatch.setattr(progress.SlowProgress, "add", lambda self, count: told.append(count))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: held.append(args) or empty(*args, **kwargs))
    monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    monkeypatch.setattr(integrity, "DigestProcess", lambda nbytes: held.append((nbytes,)) or DigestProcess(nbytes))
    for module in (integrity, checkpoint):
        monkeypatch.setattr(module, "THREADS", 1)
    assert verify_checkpoint(folder).exit == Exit.SAME
    assert sum(told) == sum(path.stat().st_size for path in folder.iterdir() if path.name != FACTS_FILE)
    assert held.count((integrity.AT_ONCE_BYTES,)) == 2
    told.clear()
    held.clear()
    assert diff_checkpoints(folder, folder).exit == Exit.SAME
    assert sum(told) == 4 * (6000 + 3 * LONG)
    assert held.count((integrity.AT_ONCE_BYTES,)) == 2


@pytest.mark.parametrize("starts", [0, 1, 3, 5])
def test_a_digest_process_that_was_killed_leaves_nothing_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    started = []

    class Killed(DigestProcess):
        def start(self, *args: Any) -> None:
            if len(started) == starts:
                self._process.kill()
            started.append(args)
            super().start(*args)

    folder = save(tmp_path, more={"exp_avg.x": torch.ones(4 * LONG)})
    monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    monkeypatch.setattr(integrity, "DigestProcess", Killed)
    found = verify_checkpoint(folder)
    assert found.exit == Exit.DAMAGED
    assert re.match(r"not verified: a process .* was ended from outside \(exit code -9", found.verdict)


def test_a_part_that_the_disk_does_not_give_is_named_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, more={"exp_avg.x": torch.ones(LONG), "exp_avg.y": torch.ones(50)})
    place, read = StoredCheckpoint(folder).spans("exp_avg.x")[0].place, integrity.read_all

    def refusing(file: io.FileIO, into: memoryview) -> None:
        if place.offset + integrity.AT_ONCE_BYTES < file.tell() < place.offset + place.length - 1000:
            raise OSError(errno.EIO, "Input/output error")
        read(file, into)

    monkeypatch.setattr(integrity, "read_all", refusing)
    outcome = verify_checkpoint(folder)
    assert outcome.facts["damaged_files"] == ["__0_0.distcp"]
    assert outcome.details == (
        f"  {folder / '__0_0.distcp'} cannot be read: [Errno 5] Input/output error",
        f"  exp_avg.x: {folder / '__0_0.distcp'} is damaged at byte {place.offset}: [Errno 5] Input/output error",
    )


@pytest.mark.parametrize("name", ["iteration", "consumed_valid_samples", "step_count", "schedule_position", "schedule"])
def test_position_is_content(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", **{name: {"max_lr": 0.2} if name == "schedule" else 17})
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert outcome.exit == Exit.DIFFERENT
    assert list(outcome.facts["differences"]) == [name]


def test_moments_on_one_side_are_a_difference_and_weights_another_model(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", more={"exp_avg.layer.weight": torch.zeros(3)})
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert outcome.facts["differences"] == {"exp_avg.layer.weight": "only in B"}
    save(tmp_path / "c", more={"main_params.other": torch.zeros(3)})
    outcome = diff_checkpoints(tmp_path / "a", tmp_path / "c")
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert outcome.details == ("  main_params.other: only in B",)


def test_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    assert main(["diff", str(tmp_path), str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared_tensors"] == 1
    with pytest.raises(SystemExit) as caught:
        main(["verify", "a", "b"])
    assert caught.value.code == 2


def test_tool_shows_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path)
    assert run_tool(tool.main, [str(tmp_path), "--tensor", WEIGHT, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["checkpoint"] == str(folder)
    assert shown["parameters"] == 6000
    assert shown["tensors"][WEIGHT]["shape"] == [6, 1000]
    assert shown["values"][WEIGHT]["first"][1] == weights()[1].item().hex()
    assert run_tool(tool.main, [str(tmp_path)]) == 0
    assert "iteration ................ 4" in capsys.readouterr().out
    assert run_tool(tool.main, [str(tmp_path), "--tensor", "none"]) == 2
    assert run_tool(tool.main, [str(tmp_path / "none")]) == 3


def test_tool_runs_as_a_program(tmp_path: Path) -> None:
    """Its folder holds a file called like a module that torch needs."""
    command = [sys.executable, str(ROOT / "tools/checkpoint/inspect.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "metadata.json is missing, and there is no latest_checkpointed_iteration.txt" in done.stderr


def test_script_of_the_documentation_reads_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/checkpoints.md").read_text("utf-8"), re.DOTALL)
    assert len(script.strip().splitlines()) <= 10
    assert "megatron" not in script
    folder = "runs/a/checkpoints/iter_0000500"
    assert folder in script
    (tmp_path / "runs/a/checkpoints").mkdir(parents=True)
    save(tmp_path / "made").rename(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    assert capsys.readouterr().out.split() == [WEIGHT, "torch.Size([6000])", *_norm().split()]


def _norm() -> str:
    return str(weights().norm())


def test_digest_needs_no_borders_of_shards_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writers may store ranges that cross a shard's border; the digest is the same."""
    folder = save(tmp_path)
    facts = TensorFacts(dtype="float32", shape=(6, 1000), shards=3, name="layer.weight")
    from_pieces = digests_of(
        StoredPiece(key=WEIGHT, facts=facts, begin=a, values=weights()[a : a + 2000]) for a in (0, 2000, 4000)
    )
    monkeypatch.setattr(tool.StoredCheckpoint, "tensor", lambda self, key: facts)
    assert verify_checkpoint(folder).facts["damaged_tensors"] == [WEIGHT]
    with_facts = read_facts(folder)
    with_facts["tensors"][WEIGHT]["digest"] = digest_hex(from_pieces[WEIGHT])
    (folder / FACTS_FILE).write_bytes(encode_facts(with_facts))
    assert verify_checkpoint(folder).exit == Exit.SAME


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra", FACTS_FILE])
def test_a_fifo_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    whole = save(tmp_path / "whole")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    found = verify_checkpoint(folder)
    assert found.exit == (Exit.DAMAGED if name == FACTS_FILE else Exit.DIFFERENT)
    assert name in "\n".join((found.verdict, *found.details))
    if name not in ("extra", FACTS_FILE):
        assert "it is a FIFO, not a file" in found.details[0]
        different = diff_checkpoints(whole, folder)
        assert different.exit == Exit.DAMAGED
        assert f"{folder / name}" in different.verdict and "it is a FIFO, not a file" in different.verdict


def test_a_command_that_is_ended_from_outside_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert [ended_by(code, "checkpoint") for code in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert ended_by(-9, "checkpoint") == Exit.DAMAGED
    assert capsys.readouterr().err == "error: checkpoint was ended by signal 9, so nothing is known\n"
