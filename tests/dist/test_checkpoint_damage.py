"""One flipped bit in any file of a checkpoint, or in the marker: verify names the file, all ranks refuse to load it."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.entry import EntryReader
from megatron.core.dist_checkpointing.folder import MARKER_FILE, complete_iterations, iteration_folder
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.determinism.checkpoint import verify_checkpoint
from megatron.determinism.report import Exit
from tests.support.legs import Ended, leg, run_legs, with_data
from tests.support.ranks import run_ranks

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUICK = "--eval-iters 0 --use-distributed-optimizer --exit-interval 2"


def several_files() -> None:
    """In a rank's process: a share is cut into files of 128 KiB."""
    writer.FILE_BYTES = 1 << 17


def flip(path: Path, draw: random.Random) -> None:
    """Turn one bit of the file over."""
    raw = bytearray(path.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def load_with_each_damaged(root: Path, words: str) -> dict[str, Ended]:
    """Rank function: for each file in turn, how a load ends while one bit of it is wrong."""
    several_files()
    paths = [*sorted(iteration_folder(root, 2).iterdir()), root / MARKER_FILE]
    ended = {}
    for path in paths:
        whole = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            flip(path, random.Random(path.name))
        dist.barrier()
        ended[path.name] = leg(words)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(whole)
    dist.barrier()
    return {**ended, "nothing": leg(words)}


def test_one_flipped_bit_in_any_file_is_named_and_refused(tmp_path: Path) -> None:
    """The first checkpoint is whole throughout, and never taken instead."""
    saving = run_legs(2, f"{QUICK} --save {tmp_path} --save-interval 1", several_files)
    assert [rank.code for rank in saving] == [0, 0]
    assert complete_iterations(tmp_path) == [1, 2]
    ranks = run_ranks(2, functools.partial(load_with_each_damaged, tmp_path), with_data(f"{QUICK} --load {tmp_path}"))
    names = [path.name for path in iteration_folder(tmp_path, 2).iterdir()]
    assert {"metadata.json", ".metadata", "__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"} <= {*names}
    for rank in ranks:
        assert rank["nothing"].code == 0, rank["nothing"].error
        assert {*rank} == {*names, MARKER_FILE, "nothing"}
        for name in (*names, MARKER_FILE):
            assert rank[name].code == 3, f"{name}: {rank[name]}"
            assert name in rank[name].error
            assert "change --load" in rank[name].error and "--ckpt-step" in rank[name].error

    for path in [*iteration_folder(tmp_path, 2).iterdir(), tmp_path / MARKER_FILE]:
        whole = path.read_bytes()
        flip(path, random.Random(path.name))
        outcome = verify_checkpoint(tmp_path)
        path.write_bytes(whole)
        assert outcome.exit == (Exit.DAMAGED if path.name == MARKER_FILE else Exit.DIFFERENT), path.name
        assert path.name in "\n".join((outcome.verdict, *outcome.details))
    assert verify_checkpoint(tmp_path).exit == Exit.SAME


def misread(numel: int) -> None:
    """In the second rank's process: one bit of a tensor of that many elements arrives otherwise."""
    if dist.get_rank() == 0:
        return
    read, spoiled = EntryReader.read, []

    def reading(self: EntryReader, place: writer.Place, out: torch.Tensor, start: int = 0) -> None:
        read(self, place, out, start)
        if out.numel() == numel and out.dtype == torch.float32 and not spoiled:
            spoiled.append(place)
            out.view(torch.int32)[0] ^= 1

    EntryReader.read = reading


@pytest.mark.parametrize(
    ("layout", "numel", "key"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 32, "norm"),
        ("--pipeline-model-parallel-size 2 !--untie-embeddings-and-output-weights", 512 * 32, "word_embeddings.weight"),
        ("", 4, "expert_bias.decoder"),
    ],
    ids=["tensor-parallel copy", "tied embedding of the last stage", "router bias"],
)
def test_a_copy_that_arrives_otherwise_on_one_rank_is_named(tmp_path: Path, layout: str, numel: int, key: str) -> None:
    """What the first rank has read of the same place is right."""
    words = f"--eval-iters 0 --exit-interval 2 {layout}"
    assert [rank.code for rank in run_legs(2, f"{words} --save {tmp_path} --save-interval 2")] == [0, 0]
    for rank in run_legs(2, f"{words} --load {tmp_path}", functools.partial(misread, numel)):
        assert rank.code == 3
        assert "not the values that were saved, after loading: " in rank.error
        assert key in rank.error


def derive_otherwise(rank: int) -> None:
    """In every rank's process: one bit of one working weight is not the master's, on that rank or (-1) on all."""
    complete = Optimizer.complete_state

    def completing(self: Optimizer) -> None:
        complete(self)
        if rank in (-1, dist.get_rank()):
            self.buffers[0].weights.view(torch.int16)[7] ^= 1

    Optimizer.complete_state = completing


@pytest.mark.parametrize(("rank", "named"), [(1, "rank 1: "), (-1, "ranks 0, 1: ")])
def test_working_weights_that_are_not_the_masters_are_named(tmp_path: Path, rank: int, named: str) -> None:
    words = "--eval-iters 0 --bf16 --exit-interval 2 --save-interval 2"
    assert [ended.code for ended in run_legs(2, f"{words} --save {tmp_path}")] == [0, 0]
    for ended in run_legs(2, f"{words} --load {tmp_path}", functools.partial(derive_otherwise, rank)):
        assert ended.code == 3
        assert f"working weights are not the loaded masters, rounded: {named}" in ended.error
