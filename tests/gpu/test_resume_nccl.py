"""A model of more than a billion parameters, bf16 over NCCL, saved in the background, stopped and resumed: one run.

Both layouts run at once: needs two GPUs that nobody else uses, 90 GB of disk, and minutes. With ``-s`` it says how far
it is.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.bench.checkpoint_io import LAYOUTS, RECIPE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

ROOT = Path(__file__).resolve().parents[2]
STOP, STEPS = 3, 6
FLAGS = f"""{RECIPE} --moe-router-enable-expert-bias --hidden-dropout 0.1 --moe-input-jitter-eps 0.01
    --train-iters {STEPS} --save-interval {STOP}"""


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Where the legs write; removed at the end whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="resume_nccl_"))
    yield folder
    shutil.rmtree(folder)


def _train(layout: str, folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_hybrid.py", *FLAGS.split(), *LAYOUTS[layout].split(), *flags]
    command += ["--save", str(folder / "checkpoints"), "--fingerprint-dir", str(folder / "fingerprint")]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    print(f"\n{layout}, {folder.name}: {time.monotonic() - began:.0f} s", end="", flush=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def _tool(*words: str | Path) -> str:
    command = [sys.executable, "-m", "megatron.determinism", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _legs(root: Path, layout: str) -> tuple[str, str]:
    """A straight leg that saves in the background, and one that goes on from its first checkpoint."""
    straight, resumed = root / layout / "straight", root / layout / "resumed"
    straight.mkdir(parents=True)
    resumed.mkdir()
    first = _train(layout, straight, "--async-save")
    second = _train(layout, resumed, "--load", str(straight / "checkpoints"), "--ckpt-step", str(STOP))
    return first, second


@functools.cache
def _all_legs(root: Path) -> dict[str, tuple[str, str]]:
    with ThreadPoolExecutor(len(LAYOUTS)) as pool:
        return dict(zip(LAYOUTS, pool.map(functools.partial(_legs, root), LAYOUTS), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_leg_is_the_straight_one(root: Path, layout: str) -> None:
    first, second = _all_legs(root)[layout]
    assert first.index("training went on after") < first.index("successfully saved checkpoint")
    assert f"at iteration {STOP}" in second
    straight, resumed = root / layout / "straight", root / layout / "resumed"
    said = _tool("compare", straight / "fingerprint", resumed / "fingerprint")
    assert f"identical on all {STEPS - STOP} common iterations" in said
    assert all(part in said for part in ("params", "main_params", "exp_avg", "exp_avg_sq", "rng"))
    ends = (leg / "checkpoints" / f"iter_{STEPS:07d}" for leg in (straight, resumed))
    print(f"\n{layout}: {said.splitlines()[0]}; {_tool('checkpoint', 'diff', *ends).splitlines()[0]}")
