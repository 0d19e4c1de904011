"""The layout table: whole training steps on several ranks against one rank, by gradient, loss, norm and token count."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import relative_error
from tests.support.training import TIED, TINY, Trained, train, whole_gradients

TOLERANCE = 1e-5
STEPS = 2


@dataclass(frozen=True)
class Cell:
    """One layout. ``bits``: it shares the logical layout of one rank, so every bit agrees. ``recipe`` is given to one
    rank too, and so are ``tied`` weights of embeddings and output layer."""

    name: str
    world: int
    flags: str
    pattern: str = "ME*EM-"
    ldp: int = 1
    bits: bool = False
    recipe: str = ""
    tied: bool = False
    microbatches: tuple[int, ...] = (1, 4)


TWO = (2,)
PP2 = "--pipeline-model-parallel-size 2"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
CAPACITY = "--moe-expert-capacity-factor 0.8"
PADDED = "--moe-pad-expert-input-to-capacity --moe-token-drop-policy position"
LATENT = "--moe-latent-size 32 --moe-shared-expert-gate"
LOSSES = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-2 1e-2 "
    "--moe-z-loss-coeff 1e-3 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-dtype fp64"
)
QK_NORM = "--qk-layernorm --position-embedding-type rope --rotary-percent 0.5"
EP2 = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn layernorm moe moe_act"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 6"
LDP2 = "--logical-data-parallel-size 2"
PER_TOKEN = "--calculate-per-token-loss --eod-mask-loss"
BF16_SUMS = "--grad-reduce-in-bf16"
SGD = "--optimizer sgd --sgd-momentum 0.5 --weight-decay 0.1"
CELLS = (
    Cell("TP2", 2, "--tensor-model-parallel-size 2", pattern="M*-M"),
    Cell("TP2-SP", 2, f"{TP2_SP} --expert-tensor-parallel-size 1"),
    Cell("TP2-SP-ETP2", 2, TP2_SP),
    Cell("PP2", 2, "--pipeline-model-parallel-size 2", pattern="ME*|EM-", bits=True),
    Cell("PP2xVPP2", 2, "--pipeline-model-parallel-size 2", pattern="M|E*|EM|-", bits=True),
    Cell("PP2-empty-stage", 2, "--pipeline-model-parallel-size 2", pattern="|ME*EM-", bits=True),
    Cell("EP2", 2, "--expert-model-parallel-size 2", ldp=2),
    Cell("EP4", 4, "--expert-model-parallel-size 4", ldp=4),
    Cell("TP2xEP2", 2, f"{TP2_SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    Cell("DP2", 2, "--use-distributed-optimizer", ldp=2),
    Cell("DP2-whole-optimizer", 2, "", ldp=2),
    Cell(
        "TP2xPP2xEP2xDP2",
        8,
        f"{TP2_SP} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--use-distributed-optimizer",
        pattern="ME*|EM-",
        ldp=2,
    ),
    Cell("PP2-tied", 2, PP2, pattern="ME*|EM-", bits=True, tied=True, microbatches=TWO),
    Cell("PP2xVPP2-tied", 2, PP2, pattern="M|E*|EM|-", bits=True, tied=True, microbatches=TWO),
    Cell("VPP-on-one-rank-tied", 1, "", pattern="M|E*|EM|-", bits=True, tied=True, microbatches=TWO),
    Cell("TP2-SP-tied", 2, f"{TP2_SP} --expert-tensor-parallel-size 1", tied=True, microbatches=TWO),
    Cell("PP2-MTP", 2, PP2, pattern="ME*|EM-/*E/*E", bits=True, microbatches=TWO),
    Cell("PP2xVPP2-MTP-tied", 2, PP2, pattern="M|E*|EM|/*E", bits=True, tied=True, microbatches=TWO),
    Cell("TP2-SP-MTP-tied", 2, f"{TP2_SP} --expert-tensor-parallel-size 1", "M*-/ME", tied=True, microbatches=TWO),
    Cell("TP2-MTP", 2, "--tensor-model-parallel-size 2", pattern="M*-/M-", microbatches=TWO),
    Cell("PP2-repeated-MTP", 2, PP2, "ME*|-/*E/*E", bits=True, recipe="--mtp-use-repeated-layer", microbatches=TWO),
    Cell("EP2-MTP", 2, "--expert-model-parallel-size 2", "M-/*E", ldp=2, microbatches=TWO),
    Cell("EP2-capacity", 2, "--expert-model-parallel-size 2", "E-E", ldp=2, recipe=CAPACITY, microbatches=TWO),
    Cell("PP2-padded-capacity", 2, PP2, "E|-E", bits=True, recipe=f"{CAPACITY} {PADDED}", microbatches=TWO),
    Cell("PP2-latent-all-losses", 2, PP2, "ME|-E", bits=True, recipe=f"{LATENT} {LOSSES}", microbatches=TWO),
    Cell(
        "TP2xEP2-latent",
        2,
        f"{TP2_SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "ME-",
        recipe=LATENT,
        microbatches=TWO,
    ),
    Cell("TP2-qk-norm", 2, "--tensor-model-parallel-size 2", "M*-", recipe=QK_NORM, microbatches=TWO),
    Cell("TP4-qk-norm-shared-groups", 4, "--tensor-model-parallel-size 4", "*-", recipe=QK_NORM, microbatches=TWO),
    Cell("PP2-recompute-full", 2, f"{PP2} {FULL}", "ME*|EM-/*E", bits=True, microbatches=TWO),
    Cell("PP2-recompute-selective", 2, f"{PP2} {SELECTIVE}", "ME*|EM-", bits=True, microbatches=TWO),
    Cell("TP2xEP2-recompute-full", 2, f"{TP2_SP} {FULL} {EP2}", "ME*E-", microbatches=TWO),
    Cell("DP2-per-token-loss", 2, DISTRIBUTED, bits=True, ldp=2, recipe=f"{LDP2} {PER_TOKEN}", microbatches=TWO),
    Cell("PP2-MTP-per-token-loss", 2, PP2, "E*|-/ME", bits=True, recipe=PER_TOKEN, microbatches=TWO),
    Cell("DP2-reduce-in-bf16", 2, DISTRIBUTED, bits=True, ldp=2, recipe=f"{LDP2} {BF16_SUMS}", microbatches=TWO),
    Cell("DP2-overlap", 2, f"{DISTRIBUTED} {OVERLAP}", bits=True, ldp=2, recipe=LDP2, microbatches=TWO),
    Cell("PP2xVPP2-no-overlap", 2, f"{PP2} --no-overlap-p2p-communication", "M|E*|EM|-", bits=True, microbatches=TWO),
    Cell("DP2-SGD", 2, DISTRIBUTED, "ME*", bits=True, ldp=2, recipe=f"{LDP2} {SGD}", microbatches=TWO),
    Cell("PP3-stage-without-parameters", 3, PP2.replace("2", "3"), "M||-", bits=True, microbatches=TWO),
    Cell("PP2-MTP-and-no-layers", 2, PP2, "|/M-", bits=True, microbatches=TWO),
    Cell("PP4-no-MoE-no-layer-stages", 4, PP2.replace("2", "4"), "|M*|E-|/E", bits=True, microbatches=TWO),
)


@functools.cache
def _one_rank(pattern: str, batch: int, recipe: str = "", tied: bool = False) -> Trained:
    flags = f"{recipe} --hybrid-layer-pattern '{pattern}' --global-batch-size {batch}"
    return run_ranks(1, train, flags, STEPS, TIED if tied else TINY)[0]


RUNS = [pytest.param(cell, n, id=f"{cell.name}-{n}") for cell in CELLS for n in cell.microbatches]


@pytest.mark.parametrize(("cell", "num_microbatches"), RUNS)
def test_layout_equals_one_rank(cell: Cell, num_microbatches: int) -> None:
    batch = cell.ldp * num_microbatches
    want = _one_rank(cell.pattern.replace("|", ""), batch, cell.recipe, cell.tied)
    flags = f"{cell.flags} {cell.recipe} --hybrid-layer-pattern '{cell.pattern}' --global-batch-size {batch}"
    got = run_ranks(cell.world, train, flags, STEPS, TIED if cell.tied else TINY)
    assert all(_same_numbers(rank, got[0]) for rank in got)
    for mine, theirs in zip(got[0].steps, want.steps, strict=True):
        assert mine.num_tokens == theirs.num_tokens
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=TOLERANCE)
        assert mine.losses.keys() == theirs.losses.keys()
        for name, value in theirs.losses.items():
            assert mine.losses[name] == pytest.approx(value, rel=TOLERANCE)
    gradients, wanted = whole_gradients(got), whole_gradients([want])
    assert gradients.keys() == wanted.keys()
    errors = {name: relative_error(gradients[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}
    if cell.bits:
        assert got[0].digests == want.digests


def _same_numbers(left: Trained, right: Trained) -> bool:
    """Equal but for the clock."""
    return [(s.losses, s.grad_norm, s.num_tokens) for s in left.steps] == [
        (s.losses, s.grad_norm, s.num_tokens) for s in right.steps
    ]


def test_a_wrong_learning_signal_is_seen() -> None:
    """The control: a batch of other samples does not pass for the same step."""
    left, right = _one_rank("ME*EM-", 1), _one_rank("ME*EM-", 2)
    errors = [relative_error(g, whole_gradients([right])[n]) for n, g in whole_gradients([left]).items()]
    assert max(errors) > 1e-2
