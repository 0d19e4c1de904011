"""No thread of a process group outlives a run: one that asks for the interpreter while it ends aborts the process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training.loop.pretrain import run_training
from megatron.training.setup.distributed import stop_process_group
from tests.support.ranks import run_ranks
from tests.support.training import build_here

FLAGS = (
    "--hybrid-layer-pattern M*E --global-batch-size 2 --expert-model-parallel-size 2 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters 1 --lr-warmup-iters 0 --eval-iters 0"
)
TASKS = Path("/proc/self/task")


def gloo_threads() -> int:
    """Threads of this process that torch named after gloo."""
    found = 0
    for task in TASKS.iterdir():
        try:
            found += "gloo" in (task / "comm").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the two looks
    return found


def train_and_leave(leave: Callable[[], None], store: Path) -> tuple[int, int]:
    """Rank function: threads of the groups while a run is there, and when it is gone and ``leave`` has returned."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gc.disable()
    circle: list[object] = [build_here(FLAGS)]
    circle.append(circle)
    run_training(circle[0], time.monotonic())
    during = gloo_threads()
    del circle
    leave()
    # A thread that was waited for may be listed a moment longer.
    deadline = time.monotonic() + 20
    while leave is stop_process_group and gloo_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    after = gloo_threads()
    # The end of the rank function's process is a barrier.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return during, after


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc")
def test_the_threads_of_the_groups_end_with_a_run(tmp_path: Path):
    for during, after in run_ranks(2, train_and_leave, stop_process_group, tmp_path / "store"):
        assert during > 0
        assert after == 0


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc")
def test_torchs_own_end_leaves_them(tmp_path: Path):
    for during, after in run_ranks(2, train_and_leave, dist.destroy_process_group, tmp_path / "store"):
        assert 0 < after <= during
