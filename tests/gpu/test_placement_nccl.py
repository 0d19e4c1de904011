"""Placement on real GPUs: which device a rank has, how NCCL sums and sends, another transport, several ranks a GPU,
late ranks, fewer ranks: one trajectory. A backend's own sums are another.

All launches run at once as far as the machine allows; two GPUs are enough, more give more maps. With ``-s`` a table;
with ``OUT`` set, ``$OUT/placement.json``.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(590)]

ROOT = Path(__file__).resolve().parents[2]
STEPS, AT_ONCE, LIMIT_S = 6, 6, 240
BASE = f"""
    --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --kv-channels 64 --mamba-num-heads 8 --mamba-head-dim 64 --mamba-state-dim 64 --mamba-num-groups 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 256
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0.1
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1
    --train-iters {STEPS} --lr 1e-3 --lr-warmup-iters 0 --bf16 --clip-grad 1.0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --log-interval 1 --deterministic-mode
"""
RECIPES = {
    "dense": "--logical-data-parallel-size 8 --logical-reduce-block-size 4 --global-batch-size 16",
    "experts": "--logical-data-parallel-size 8 --global-batch-size 8 --expert-model-parallel-size 2",
    "tensor": "--logical-data-parallel-size 2 --global-batch-size 4 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
}
SHARDED = "--use-distributed-optimizer"
GLOO = "--distributed-backend gloo"
ALLOWED = "--determinism-allow-env NCCL_ALGO"


@dataclass(frozen=True)
class Cell:
    """One launch of a recipe. The first of a recipe is what the others are compared with; ``late`` seeds delays."""

    recipe: str
    name: str
    ranks: int
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    pattern: str = "ME*E-M"
    late: int = 0
    other: bool = False

    def __str__(self) -> str:
        return f"{self.recipe}: {self.name}"


def _env(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


GPUS = max(2, torch.cuda.device_count())
REVERSED = ",".join(str(i) for i in reversed(range(GPUS)))
ROTATED = ",".join(str((i + 1) % GPUS) for i in range(GPUS))
FEW = _env(NCCL_PROTO="LL128", NCCL_MIN_NCHANNELS=1, NCCL_MAX_NCHANNELS=1)
MANY = _env(NCCL_PROTO="Simple", NCCL_MIN_NCHANNELS=16, NCCL_MAX_NCHANNELS=32, NCCL_MIN_P2P_NCHANNELS=16)
SOCKETS = _env(NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_SOCKET_IFNAME="lo")

CELLS = (
    Cell("dense", "NCCL, DP 2", 2, SHARDED),
    Cell("dense", "gloo, DP 8, several ranks a GPU", 8, f"{GLOO} {SHARDED}"),
    Cell("dense", "gloo, DP 4", 4, GLOO),
    Cell("dense", "gloo, DP 2", 2, f"{GLOO} {SHARDED}"),
    Cell("dense", "one GPU, DP 1", 1),
    Cell("dense", "devices reversed", 2, SHARDED, _env(CUDA_VISIBLE_DEVICES=REVERSED)),
    Cell("dense", "ring, Simple", 2, "", _env(NCCL_ALGO="Ring", NCCL_PROTO="Simple")),
    Cell("dense", "tree, LL", 2, f"{SHARDED} {ALLOWED}", _env(NCCL_ALGO="ring;allreduce:tree", NCCL_PROTO="LL")),
    Cell("dense", "LL128, 1 channel", 2, SHARDED, FEW),
    Cell("dense", "Simple, 16 to 32 channels", 2, SHARDED, MANY),
    Cell("dense", "through host memory", 2, SHARDED, _env(NCCL_P2P_DISABLE=1)),
    Cell("dense", "through sockets", 2, SHARDED, SOCKETS),
    Cell("dense", "late ranks 1", 2, SHARDED, late=1),
    Cell("dense", "late ranks 2, devices reversed", 2, "", _env(CUDA_VISIBLE_DEVICES=REVERSED), late=2),
    Cell("dense", "PP 2", 2, "--pipeline-model-parallel-size 2", pattern="ME*|E-M"),
    Cell("dense", "gloo, PP 2", 2, f"--pipeline-model-parallel-size 2 {GLOO}", pattern="ME*|E-M"),
    Cell("dense", "small buckets", 2, f"{SHARDED} --ddp-bucket-size 50000"),
    Cell("dense", "the backend's sums", 2, f"{SHARDED} --op-variants float_sums=native", other=True),
    Cell("experts", "NCCL, DP 2", 2, SHARDED),
    Cell("experts", "gloo, DP 4", 4, f"{GLOO} {SHARDED}"),
    Cell("experts", "devices reversed, late ranks", 2, "", _env(CUDA_VISIBLE_DEVICES=REVERSED), late=3),
    Cell("experts", "LL128, 1 channel", 2, "", FEW),
    Cell("tensor", "NCCL, DP 1", 2, SHARDED),
    Cell("tensor", "gloo, DP 2", 4, f"{GLOO} {SHARDED}"),
    Cell("tensor", "devices reversed, late ranks", 2, "", _env(CUDA_VISIBLE_DEVICES=REVERSED), late=4),
    Cell("tensor", "Simple, 16 to 32 channels", 2, "", MANY),
)
MORE = (
    Cell("dense", "NCCL, DP 4", 4, SHARDED),
    Cell("dense", "DP 4, devices reversed", 4, SHARDED, _env(CUDA_VISIBLE_DEVICES=REVERSED)),
    Cell("dense", "DP 4, devices rotated", 4, SHARDED, _env(CUDA_VISIBLE_DEVICES=ROTATED)),
    Cell("dense", "DP 4, tree, LL", 4, f"{SHARDED} {ALLOWED}", _env(NCCL_ALGO="ring;allreduce:tree", NCCL_PROTO="LL")),
    Cell("dense", "DP 4, the backend's sums", 4, f"{SHARDED} --op-variants float_sums=native", other=True),
    Cell("experts", "NCCL, DP 4", 4, SHARDED, _env(CUDA_VISIBLE_DEVICES=ROTATED)),
    Cell("tensor", "NCCL, DP 2", 4, SHARDED, _env(CUDA_VISIBLE_DEVICES=ROTATED)),
)
ALL = (*CELLS, *(MORE if GPUS >= 4 else ()))


def _first_of(recipe: str) -> Cell:
    return next(cell for cell in ALL if cell.recipe == recipe)


@dataclass(frozen=True)
class Launched:
    """How a launch went: seconds it took, and the end of its output where it failed."""

    folder: Path
    seconds: float
    failure: str


def _launch(cell: Cell, folder: Path) -> Launched:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.ranks)]
    command += ["-m", "tests.support.delayed_launch", str(cell.late)] if cell.late else ["pretrain_hybrid.py"]
    command += [*shlex.split(BASE), *shlex.split(RECIPES[cell.recipe]), *shlex.split(cell.flags)]
    command += ["--hybrid-layer-pattern", cell.pattern, "--fingerprint-dir", str(folder)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **cell.environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        failure = "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired as error:
        failure = f"not done in {LIMIT_S} s: {(error.stdout or b'')[-2000:]!r}"
    return Launched(folder, time.monotonic() - started, failure)


def _compare(left: Path, right: Path, *further: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron.determinism", "compare", str(left), str(right), *further]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@functools.cache
def _all() -> dict[Cell, Launched]:
    """Every launch, made once. The first one compiles the kernels for the others."""
    base = Path(tempfile.mkdtemp())
    names = {cell: base / str(number) for number, cell in enumerate(ALL)}
    first, *others = ALL
    done = {first: _launch(first, names[first])}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done |= dict(zip(others, pool.map(lambda cell: _launch(cell, names[cell]), others), strict=True))
    return done


def _verdict(cell: Cell) -> tuple[bool, str]:
    """Whether a cell is as it should be, and what was seen."""
    launched, first = _all()[cell], _all()[_first_of(cell.recipe)]
    if launched.failure or first.failure:
        return False, launched.failure or first.failure
    done = _compare(first.folder, launched.folder, *(["--force"] if cell.other else []))
    text = (done.stdout + done.stderr).strip()
    wanted = 1 if cell.other else 0
    return done.returncode == wanted and (cell.other or f"all {STEPS} common" in text), text


@pytest.fixture(scope="module", autouse=True)
def table():
    """Print what every cell came to, whatever the tests say of it, and write it where ``OUT`` says."""
    started = time.monotonic()
    rows = []
    for cell, launched in _all().items():
        good, text = _verdict(cell)
        rows.append({**asdict(cell), "seconds": launched.seconds, "good": good, "seen": text})
        shown = text.splitlines()[0] if not launched.failure else launched.failure.strip().splitlines()[-1]
        print(f"\n{'ok ' if good else 'BAD'} {launched.seconds:5.0f} s  {cell!s:45} {shown[:90]}", end="")
    print(f"\n{len(rows)} launches in {time.monotonic() - started:.0f} s on {GPUS} GPUs")
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "placement.json").write_text(json.dumps(rows, indent=1))


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_placement_changes_no_bit_and_a_backends_sum_does(cell: Cell) -> None:
    good, text = _verdict(cell)
    assert good, text
