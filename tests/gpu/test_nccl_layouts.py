"""Real launches over NCCL in bf16: every layout runs, learns, and two launches of it are identical bit for bit."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
RECIPE = f"""
    --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --group-query-attention --num-query-groups 4
    --kv-channels 64 --mamba-num-heads 32 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8
    --train-iters {STEPS} --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --adam-beta2 0.95 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --log-interval 1 --deterministic-mode
    --use-distributed-optimizer
"""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"


@dataclass(frozen=True)
class Cell:
    """One layout on this many GPUs."""

    name: str
    gpus: int
    flags: str
    pattern: str = "MEM*EM-E"


CELLS = (
    Cell("one", 1, ""),
    Cell("TP2", 2, f"{TP2} --expert-model-parallel-size 1"),
    Cell("PP2", 2, "--pipeline-model-parallel-size 2", pattern="MEM*|EM-E"),
    Cell("EP2", 2, "--expert-model-parallel-size 2"),
    Cell("DP2", 2, ""),
    Cell("TP2xEP2xPP2", 4, f"{TP2} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2", "MEM*|EM-E"),
    Cell("EP4", 4, "--expert-model-parallel-size 4"),
    Cell("PP2xVPP2xDP2", 4, "--pipeline-model-parallel-size 2", pattern="ME|M*|EM|-E"),
)


@dataclass(frozen=True)
class Overlap:
    """A layout with overlap and without."""

    cell: Cell
    on: str
    off: str = ""


BOTH = "--overlap-grad-reduce --overlap-param-gather"
OVERLAPS = (
    Overlap(Cell("DP2", 2, ""), f"{BOTH} --ddp-num-buckets 12"),
    Overlap(Cell("LDP4-over-DP2", 2, "--logical-data-parallel-size 4"), f"{BOTH} --ddp-num-buckets 5"),
    Overlap(
        Cell("PP2xVPP2", 2, "--pipeline-model-parallel-size 2", pattern="ME|M*|EM|-E"),
        "--overlap-grad-reduce",
        "--no-overlap-p2p-communication",
    ),
    Overlap(
        Cell("PP2xVPP2xDP2", 4, "--pipeline-model-parallel-size 2", pattern="ME|M*|EM|-E"),
        f"{BOTH} --ddp-num-buckets 12",
        "--no-overlap-p2p-communication",
    ),
    Overlap(Cell("TP2xEP2xDP2", 4, f"{TP2} --expert-model-parallel-size 2"), f"{BOTH} --ddp-num-buckets 12"),
)


def _launch(cell: Cell, folder: Path, flags: str = "") -> list[dict]:
    """Train in fresh processes; the steps' metrics."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.gpus)]
    command += ["pretrain_hybrid.py", *shlex.split(RECIPE), *shlex.split(cell.flags), *shlex.split(flags)]
    command += ["--hybrid-layer-pattern", cell.pattern]
    command += ["--run-dir", str(folder), "--fingerprint-dir", str(folder / "fingerprint")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


HERE = [cell for cell in CELLS if cell.gpus <= max(2, torch.cuda.device_count())]
"""Cells of up to two GPUs always count; larger ones where the machine has them."""


def _require_one_run(first: Path, second: Path) -> None:
    command = [sys.executable, "-m", "megatron.determinism", "compare", str(first), str(second)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all {STEPS} common iterations" in done.stdout


def _median_ms(steps: list[dict]) -> float:
    times = sorted(1000 * step["elapsed_s"] for step in steps[5:])
    return times[len(times) // 2]


@pytest.mark.parametrize("cell", HERE, ids=lambda cell: cell.name)
def test_two_launches_are_one_run(cell: Cell, tmp_path: Path) -> None:
    first = _launch(cell, tmp_path / "first")
    _launch(cell, tmp_path / "second")
    _require_one_run(*(tmp_path / leg / "fingerprint" for leg in ("first", "second")))
    losses = [step["losses"]["lm loss"] for step in first]
    assert losses[-1] < 0.8 * losses[0], losses
    print(
        f"\n{cell.name}: {cell.gpus} GPU, loss {losses[0]:.4f} -> {losses[-1]:.4f}, median step "
        f"{_median_ms(first):.1f} ms, two launches identical on all {STEPS} steps"
    )


GPUS = torch.cuda.device_count()


@pytest.mark.parametrize("overlap", [o for o in OVERLAPS if o.cell.gpus <= max(2, GPUS)], ids=lambda o: o.cell.name)
def test_overlap_is_the_same_run(overlap: Overlap, tmp_path: Path) -> None:
    """Two launches with overlap, and one without."""
    legs = {"on": overlap.on, "again": overlap.on, "off": overlap.off}
    steps = {leg: _launch(overlap.cell, tmp_path / leg, flags) for leg, flags in legs.items()}
    for other in ("again", "off"):
        _require_one_run(tmp_path / "on" / "fingerprint", tmp_path / other / "fingerprint")
    on, again, off = (_median_ms(steps[leg]) for leg in legs)
    print(
        f"\n{overlap.cell.name}: {overlap.cell.gpus} GPU, median step with overlap {on:.1f} and {again:.1f} ms, "
        f"without {off:.1f} ms, three launches identical on all {STEPS} steps"
    )
