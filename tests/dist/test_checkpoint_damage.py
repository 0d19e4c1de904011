"""One flipped bit in any file of a checkpoint, or in the marker: verify names the file, all ranks refuse to load it."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.folder import MARKER_FILE, complete_iterations, iteration_folder
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
            assert "change --load, or choose an iteration with --ckpt-step" in rank[name].error

    for path in [*iteration_folder(tmp_path, 2).iterdir(), tmp_path / MARKER_FILE]:
        whole = path.read_bytes()
        flip(path, random.Random(path.name))
        outcome = verify_checkpoint(tmp_path)
        path.write_bytes(whole)
        assert outcome.exit == (Exit.DAMAGED if path.name == MARKER_FILE else Exit.DIFFERENT), path.name
        assert path.name in "\n".join((outcome.verdict, *outcome.details))
    assert verify_checkpoint(tmp_path).exit == Exit.SAME
