"""Sizes of published models, what a rank needs, and the command that prints them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.resolve import resolve_vocabulary
from megatron.training.config.run import RunConfig
from megatron.training.config.validate import resolve_and_validate
from megatron.training.loop.dry_run import dry_run, parameter_counts, report
from tests.architecture.sources import ROOT
from tests.support.settings import SMALL, effective

VOCABULARY = 131072
COMMON = """
    --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights --normalization RMSNorm
    --position-embedding-type none --group-query-attention --kv-channels 128 --seq-length 8192
    --micro-batch-size 1 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 131072 --mock-data
"""
EXPERTS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32"
MODELS = {
    "nano": f"""
        --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME {EXPERTS}
        --hidden-size 2688 --num-attention-heads 32 --num-query-groups 2 --mamba-num-heads 64
        --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    """,
    "super": f"""
        --hybrid-layer-pattern MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME
        {EXPERTS} --hidden-size 4096 --num-attention-heads 32 --num-query-groups 2 --mamba-num-heads 128
        --num-experts 512 --moe-router-topk 22 --moe-latent-size 1024
        --moe-ffn-hidden-size 2688 --moe-shared-expert-intermediate-size 5376
    """,
    "ultra": f"""
        --hybrid-layer-pattern
        MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME
        {EXPERTS} --hidden-size 8192 --num-attention-heads 64 --num-query-groups 2 --mamba-num-heads 256
        --num-experts 512 --moe-router-topk 22 --moe-latent-size 2048
        --moe-ffn-hidden-size 5120 --moe-shared-expert-intermediate-size 10240
    """,
    "h-8b": f"""
        --hybrid-layer-pattern M-M-M-M*-{"M-M-M-M-M*-" * 3}M-M-M-M-M-
        --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8 --mamba-num-heads 128
    """,
    "h-56b": f"""
        --hybrid-layer-pattern M-M-M-M*-{"M-M-M-M-M*-" * 9}M-M-M-M-M-
        --hidden-size 8192 --ffn-hidden-size 32768 --num-attention-heads 64 --num-query-groups 8 --mamba-num-heads 256
        --mamba-state-dim 256
    """,
}


def config_of(text: str, world_size: int = 1) -> RunConfig:
    given = parse_run_config([*COMMON.split(), *text.split()])
    return resolve_vocabulary(resolve_and_validate(given, world_size), VOCABULARY)


# Per layer: Nemotron-H and Nemotron 3 technical reports' shapes through the formulas; totals as published.
EACH = {
    "nano": {"M": 38_744_896, "*": 23_399_040, "E": 1_297_468_032},
    "super": {"M": 109_640_064, "*": 35_655_680, "E": 2_873_102_336},
    "ultra": {"M": 421_645_056, "*": 138_420_224, "E": 10_942_947_328},
    "h-8b": {"M": 109_640_064, "*": 41_947_136, "-": 176_164_864},
    "h-56b": {"M": 438_432_512, "*": 151_003_136, "-": 536_879_104},
}
TOTAL = {"nano": "31.578", "super": "120.669", "ultra": "549.309", "h-8b": "8.101", "h-56b": "56.324"}
ACTIVE = {"nano": ("3.580", "3.228"), "super": ("12.770", "12.233"), "ultra": ("56.059", "54.985")}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str) -> None:
    parts = {part.part: part for part in parameter_counts(config_of(MODELS[name]), VOCABULARY)}
    assert {symbol: parts[symbol].total / parts[symbol].count for symbol in EACH[name]} == EACH[name]
    total, active = sum(p.total for p in parts.values()), sum(p.active for p in parts.values())
    assert f"{total / 1e9:.3f}" == TOTAL[name]
    with_input, without_input = ACTIVE.get(name, (TOTAL[name], None))
    assert f"{active / 1e9:.3f}" == with_input
    if without_input:
        assert f"{(active - parts['embedding'].total) / 1e9:.3f}" == without_input


@pytest.mark.parametrize(("flag", "blocks"), [("--mtp-use-repeated-layer", 1), ("--mtp-num-layers 2", 2)])
def test_multi_token_prediction_is_counted_apart(flag: str, blocks: int) -> None:
    text = MODELS["nano"].replace("EMEMEMEME ", "EMEMEMEME/*E/*E ")
    parts = {part.part: part for part in parameter_counts(config_of(f"{text} {flag}"), VOCABULARY)}
    prediction = parts["multi-token prediction"]
    assert (prediction.total, prediction.active) == (blocks * 1_335_325_824, blocks * 118_027_392)
    assert f"{sum(p.total for p in parts.values() if p is not prediction) / 1e9:.3f}" == TOTAL["nano"]


def test_counts_do_not_depend_on_the_layout() -> None:
    layout = """
        --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
        --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    """
    spread = parameter_counts(config_of(MODELS["nano"] + layout, 32), VOCABULARY, 32)
    assert spread == parameter_counts(config_of(MODELS["nano"]), VOCABULARY)


def needs(*more: str, world_size: int = 1) -> list[list[float]]:
    """The columns of every stage: parameters, weights, gradients, masters, moments, activations, sum."""
    config = config_of(MODELS["nano"] + " --bf16 " + " ".join(more), world_size)
    lines = report(config, VOCABULARY, world_size)
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("needed")) + 2 :]
    rows = [row.split() for row in rows if row.split()[0].isdigit()]
    return [[float(cell.replace(",", "")) for cell in row[1:8]] for row in rows]


def test_rank_of_one_holds_everything() -> None:
    ((parameters, weights, gradients, masters, moments, activations, total),) = needs()
    gib = 31_577_937_344 / 2**30
    assert parameters == 31_577_937_344
    assert weights == pytest.approx(2 * gib, rel=1e-3)
    assert [gradients, masters, moments] == pytest.approx([4 * gib, 4 * gib, 8 * gib], rel=1e-3)
    assert total == pytest.approx(weights + gradients + masters + moments + activations, abs=0.03)


def test_cuts_reach_the_bytes() -> None:
    whole = needs("--global-batch-size 16")[0]
    spread = needs(
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --global-batch-size 16",
        world_size=8,
    )
    assert sum(stage[0] for stage in spread) < 0.35 * whole[0]
    cut = needs(
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --global-batch-size 16",
        "--use-distributed-optimizer",
        world_size=8,
    )
    for plain, with_distributed in zip(spread, cut, strict=True):
        assert with_distributed[1:3] == plain[1:3]
        assert with_distributed[3] < plain[3]
    # The first stage holds two micro-batches' activations, the last one.
    assert spread[0][5] > 1.2 * (spread[1][5] - 2 * 2 * 8192 * VOCABULARY / 2**30)


def test_passes_carry_two_sums() -> None:
    one = needs("--global-batch-size 16", world_size=4)[0]
    several = needs("--global-batch-size 16 --logical-data-parallel-size 16", world_size=4)[0]
    assert several[2] - one[2] == pytest.approx(2 * one[2] / 4, rel=1e-3)
    assert several[:2] == one[:2]


def run(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain_hybrid.py"), *SMALL, "--dry-run", *more],
        cwd=tmp_path,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_dry_run_prints_and_stops(tmp_path: Path) -> None:
    cut = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
    done = run(tmp_path, *cut, "--dry-run-world-size", "8", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "needed by one rank of 8 (TP 2, PP 2, DP 2" in done.stdout
    assert "consumed samples" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    done = run(tmp_path, "--tensor-model-parallel-size", "3", "--dry-run-world-size", "8")
    assert done.returncode == 2
    assert "8 processes with --tensor-model-parallel-size 3" in done.stderr


def test_number_of_processes_needs_a_dry_run() -> None:
    with pytest.raises(ConfigError, match="--dry-run-world-size 8 without --dry-run"):
        config_of(MODELS["nano"] + "--dry-run-world-size 8")


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        dry_run(effective(world_size=2))
        assert ("needed by one rank of 2" in capsys.readouterr().out) == (rank == "0")
