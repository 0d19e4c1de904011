"""Rules between settings: each breach says what was given, what is needed, with numbers, and what to change."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.fields import flags_of
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.bounds import (
    ABOVE_ZERO,
    BELOW_ONE,
    FACTORS,
    LEAST,
    MOST,
    MOST_FACTOR,
    UP_TO_ONE,
    missing_problems,
    range_problems,
)
from megatron.training.config.layout_rules import layout_problems
from megatron.training.config.model_rules import model_problems
from megatron.training.config.resolve import resolution_notes, resolve
from megatron.training.config.run import RunConfig, config_classes
from megatron.training.config.training_rules import training_problems
from megatron.training.config.validate import config_problems, resolve_and_validate, without_repeats
from tests.support.settings import SMALL, given


def problems(flags: str, world_size: int = 1) -> list[str]:
    return [str(problem) for problem in config_problems(given(*flags.split()), world_size)]


TP = "--tensor-model-parallel-size"
SP = "--sequence-parallel"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("", 7),
        (f"{TP} 2 {SP}", 2),
        (f"{TP} 2 {SP} --pipeline-model-parallel-size 2", 8),
        ("--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|*|E|M", 2),
        (f"{TP} 2 {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 4),
        (f"{TP} 2 --hybrid-layer-pattern M-*", 2),
        (f"{TP} 4 {SP} --group-query-attention --num-query-groups 2 --mamba-num-groups 4", 4),
        (f"{TP} 2 {SP} --group-query-attention --num-query-groups 4", 2),
        ("--moe-router-topk 1 --moe-router-pre-softmax", 1),
        ("--moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias", 1),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2 --qk-layernorm", 1),
        ("--optimizer sgd --sgd-momentum 0 --grad-reduce-in-bf16 --calculate-per-token-loss", 1),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm core_attn", 1),
        ("--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-z-loss-coeff 1e-3 --moe-latent-size 8", 1),
        ("--moe-expert-capacity-factor 1.1 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position", 1),
        ("--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1 0.5", 2),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-iters 1", 1),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1", 1),
        ("--logical-data-parallel-size 4 --logical-reduce-block-size 3", 4),
        ("--logical-data-parallel-size 4", 2),
        ("--logical-data-parallel-size 6 --expert-model-parallel-size 2", 2),
        ("--position-embedding-type rope --rotary-percent 0.5", 1),
        ("--position-embedding-type none --hybrid-layer-pattern ME/*E/*E --mtp-use-repeated-layer", 1),
        ("--hybrid-layer-pattern M-*E --max-position-embeddings 64 --bf16", 1),
    ],
)
def test_what_fits_is_accepted(flags: str, world_size: int):
    assert problems(flags, world_size) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (f"{TP} 4 {SP} --mamba-num-groups 4", 2, "2 processes with --tensor-model-parallel-size 4 and"),
        ("--overlap-param-gather --overlap-grad-reduce", 1, "given --overlap-param-gather without --use-distributed"),
        ("--overlap-param-gather --use-distributed-optimizer", 1, "change: add --overlap-grad-reduce, or leave out"),
        (f"{TP} 2 {SP} --expert-model-parallel-size 4", 6, "a multiple of 2 * 4 * 1 = 8"),
        (f"{TP} 2 {SP} --num-attention-heads 5 --kv-channels 16", 2, "given --num-attention-heads 5 with"),
        (f"{TP} 4 {SP} --mamba-num-groups 4 --num-attention-heads 12 --kv-channels 4 --group-query-attention"
         " --num-query-groups 6", 4, "needed: a multiple or a divisor of 4; change: --num-query-groups or"),
        ("--num-attention-heads 6 --kv-channels 16 --group-query-attention --num-query-groups 4", 1,
         "a number of heads that 4 groups divide"),
        ("--num-attention-heads 5", 1, "a width that 5 heads divide, or the width of a head; change: add"),
        (f"{TP} 4 {SP}", 4, "given --mamba-num-groups 2 with --tensor-model-parallel-size 4; needed: a multiple of 4"),
        ("--mamba-num-groups 3", 1, "8 mixer heads (--mamba-num-heads) with --mamba-num-groups 3"),
        ("--mamba-head-dim 48", 1, "2 * 64 = 128 to be a multiple of 48"),
        ("--expert-model-parallel-size 3", 3, "given --num-experts 4 with --expert-model-parallel-size 3"),
        ("--expert-model-parallel-size 2 --num-experts 0 --hybrid-layer-pattern M", 2, "2 without experts"),
        ("--num-experts 0", 1, "1 E layer in --hybrid-layer-pattern without --num-experts (or with 0)"),
        ("--num-experts 0 --hybrid-layer-pattern M --moe-ffn-hidden-size 8", 1, "--moe-ffn-hidden-size 8 without"),
        (f"{TP} 2", 2, "E layers in the pattern with --tensor-model-parallel-size 2 and no --sequence-parallel"),
        (f"{TP} 2 {SP} --seq-length 33", 2, "--seq-length 33 with --sequence-parallel, --tensor-model-parallel"),
        (f"{TP} 2 {SP} --ffn-hidden-size 99 --moe-ffn-hidden-size 98", 2, "given --ffn-hidden-size 99"),
        (f"{TP} 2 {SP} --moe-ffn-hidden-size 99", 2, "given --moe-ffn-hidden-size 99"),
        (f"{TP} 2 {SP} --moe-shared-expert-intermediate-size 9", 2, "--moe-shared-expert-intermediate-size 9 with"),
        (f"{TP} 2 --hidden-size 65 --hybrid-layer-pattern -/- --position-embedding-type none", 2,
         "given / parts in the pattern and --hidden-size 65 with --tensor-model-parallel-size 2"),
        ("--pipeline-model-parallel-size 3", 3, "the pattern has 4 layers and no |"),
        ("--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|-|E", 2, "the pattern has 3 segments"),
        ("--hybrid-layer-pattern MX", 1, "with 'X' as character 2"),
        ("--hybrid-layer-pattern MG", 1, "Gated DeltaNet"),
        ("--hybrid-layer-pattern ME/*E", 1, "rope or none: the tokens ahead have no learned positions"),
        ("--hybrid-layer-pattern ME --mtp-num-layers 1", 1, "the layers of each depth: one / part per depth"),
        ("--global-batch-size 6 --micro-batch-size 2", 2, "a multiple of 2 * 2 = 4"),
        ("--logical-data-parallel-size 3", 2, "data-parallel ranks that divide 3 (1, 3), or a multiple of 2 logical"),
        (
            "--logical-data-parallel-size 4 --expert-model-parallel-size 4",
            2,
            "2 processes with --expert-tensor-parallel-size 1, --expert-model-parallel-size 4",
        ),
        ("--logical-reduce-block-size 3", 2, "--logical-reduce-block-size 3 with 2 logical shards"),
        ("--squared-relu --swiglu", 1, "one activation"),
        ("--swiglu --hidden-size 16 --num-attention-heads 1 --mamba-head-dim 4", 1, "add --ffn-hidden-size"),
        ("--max-position-embeddings 16", 1, "at least the sequence length, 32"),
        ("--moe-router-topk 5", 1, "--moe-router-topk 5 with --num-experts 4; needed: at most 4"),
        ("--moe-router-topk 1", 1, "add --moe-router-pre-softmax, or --moe-router-score-function sigmoid"),
        ("--moe-router-enable-expert-bias", 1, "--moe-router-score-function sigmoid"),
        ("--moe-router-pre-softmax --moe-router-score-function sigmoid", 1, "leave out --moe-router-pre-softmax"),
        ("--recompute-granularity full", 1, "add --recompute-method uniform --recompute-num-layers 1"),
        ("--optimizer sgd --sgd-momentum 1", 1, "--sgd-momentum 1.0; needed: at least 0 and less than 1"),
        ("--recompute-num-layers 2", 1, "leave them out, or --recompute-granularity full"),
        ("--recompute-modules moe mlp", 1, "--recompute-modules moe mlp without --recompute-granularity selective"),
        ("--moe-router-num-groups 2", 1, "given --moe-router-num-groups 2 without --moe-router-group-topk; "),
        ("--moe-router-group-topk 2", 1, "change: add --moe-router-num-groups, or leave out --moe-router-group-topk"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 2", 1, "groups that divide the experts"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 1", 1, "1 experts; needed: at least 2"),
        ("--moe-expert-capacity-factor 0", 1, "more than 0"),
        ("--moe-pad-expert-input-to-capacity", 1, "add --moe-expert-capacity-factor"),
        ("--moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1 0", 1, "or none alone"),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1", 1, "one coefficient for"),
        ("--moe-aux-loss-coeff -1", 1, "at least 0; change: --moe-aux"),
        ("--moe-shared-expert-gate", 1, "add --moe-shared-expert-intermediate-size"),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1 --logical-data-parallel-size 4", 2,
         "start 4 processes"),
        ("--position-embedding-type rope --rotary-percent 0.2", 1, "which rotates 3 channels"),
        ("--train-samples 5", 1, "given --train-iters 3 and --train-samples 5; needed: the length of training, once"),
        ("--lr-decay-samples 5", 1, "--lr-decay-samples 5 in a run counted by --train-iters"),
        ("--lr-warmup-samples 1", 1, "--lr-warmup-samples 1 in a run counted by --train-iters"),
        ("--lr-warmup-iters 3", 1, "a warm-up of 3 samples with a decay that ends at 3 samples"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, "the length of the warm-up, once"),
        ("--min-lr 0.1", 1, "--min-lr 0.1 with --lr 0.001; needed: at most the peak, 0.001"),
        ("--lr-warmup-init 0.1", 1, "--lr-warmup-init 0.1 with --lr 0.001"),
        ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters or --lr-wsd-decay-samples"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9", 1, "needed: at most 3 samples"),
        ("--weight-decay-incr-style linear", 1, "--start-weight-decay and --end-weight-decay"),
        ("--start-weight-decay 0.1", 1, "--weight-decay alone"),
        ("--ddp-num-buckets 2 --ddp-bucket-size 9", 1, "one statement about buckets"),
        ("--padded-vocab-size 100", 1, "at least the 258 ids"),
        (f"{TP} 2 {SP} --no-pad-vocab-size --vocab-size 259", 2, "259 embedding rows under"),
        ("--tokenizer-type NullTokenizer", 1, "--tokenizer-type NullTokenizer without a size"),
        ("--mock-data --data-path a", 1, "one source of data"),
        (
            f"{TP} 3 {SP} --seq-length 33 --hybrid-layer-pattern E --moe-ffn-hidden-size 100",
            3,
            f"given --moe-ffn-hidden-size 100 with {TP} 3; needed: a multiple of 3; change: --moe-ffn-hidden-size, "
            f"--expert-tensor-parallel-size or {TP}",
        ),
        ("--seed 0", 1, "given --seed 0; needed: 1 to"),
    ],
)  # fmt: skip
def test_breach_is_named(flags: str, world_size: int, expected: str):
    (problem,) = problems(flags, world_size)
    assert expected in problem


def test_data_is_never_made_up_unasked():
    """Control: the same command line with ``--mock-data`` is accepted, above."""
    words = [word for word in SMALL if word != "--mock-data"]
    (problem,) = config_problems(parse_run_config(words), 1)
    assert str(problem).startswith("given neither --data-path nor --mock-data;")
    assert config_problems(parse_run_config([*words, "--train-data-path", "a"]), 1) == []
    dry = parse_run_config([*words, "--dry-run"])
    assert config_problems(dry, 1) == []
    assert resolution_notes(dry, resolve(dry, 1)) == [
        "no data named: a run needs --data-path or --mock-data, a dry run does not"
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-shared-expert-intermediate-size 8", "shared experts without biases; change: add --disable-bias-linear"),
        (f"{TP} 2 {SP}", f"{TP} 2; needed: experts without biases"),
    ],
)
def test_experts_with_biases(flags: str, expected: str):
    config = given(*flags.split())
    with_biases = dataclasses.replace(config, model=dataclasses.replace(config.model, add_bias_linear=True))
    (problem,) = config_problems(with_biases, 2)
    assert expected in str(problem)


def test_empty_command_line_names_everything_that_is_missing():
    found = "\n".join(map(str, config_problems(RunConfig(), 1)))
    for flag in ("--hybrid-layer-pattern", "--hidden-size", "--seq-length", "--micro-batch-size", "--lr",
                 "--train-iters", "--tokenizer-type"):  # fmt: skip
        assert flag in found


def test_every_problem_is_raised_at_once():
    config = given(*f"{TP} 3 --seed 0 --global-batch-size 5 --moe-router-topk 9 --min-lr 2".split())
    with pytest.raises(ConfigError) as caught:
        resolve_and_validate(config, 6)
    text = str(caught.value)
    for word in ("--seed 0", "--global-batch-size 5", "--moe-router-topk 9", "--min-lr 2", "--mamba-num-groups 2"):
        assert word in text


BOUNDS = (
    *((group, name, (least - 1,), (least,)) for group, names in LEAST.items() for name, least in names.items()),
    *((group, name, (most + 1, 10**17), (most,)) for group, names in MOST.items() for name, most in names.items()),
    *((group, name, (MOST_FACTOR + 1, 1e20), (MOST_FACTOR,)) for group, names in FACTORS.items() for name in names),
    *((group, name, (0, -1), (0.5,)) for group, names in ABOVE_ZERO.items() for name in names),
    *((group, name, (0, 1.5, 1e30), (1e-8, 1)) for group, names in UP_TO_ONE.items() for name in names),
    *((group, name, (-0.5, 1), (0, 0.5)) for group, names in BELOW_ONE.items() for name in names),
)


@pytest.mark.parametrize(
    ("group", "name", "bad", "good"), BOUNDS, ids=[f"{group}.{name}" for group, name, *_ in BOUNDS]
)
def test_every_bound_holds(group: str, name: str, bad: tuple[float, ...], good: tuple[float, ...]):
    part = getattr(RunConfig(), group)
    for value in (*bad, *good):
        of = (0, value) if isinstance(getattr(part, name), tuple) else value
        config = dataclasses.replace(RunConfig(), **{group: dataclasses.replace(part, **{name: of})})
        assert ((group, name) in range_problems(config)) == (value in bad), (name, value)


def test_bounds_name_fields_that_exist():
    fields = {(group, flag.name) for group, cls in config_classes().items() for flag in flags_of(cls)}
    named = {
        (group, name)
        for table in (LEAST, MOST, FACTORS, ABOVE_ZERO, UP_TO_ONE, BELOW_ONE)
        for group, names in table.items()
        for name in names
    }
    assert named <= fields


@pytest.mark.parametrize("flags", [f"{TP} 0", "--mamba-num-groups 0", "--micro-batch-size 0", "--mamba-head-dim 0",
                                   "--pipeline-model-parallel-size -1", "--expert-model-parallel-size 0",
                                   "--num-experts -4", "--num-experts 2147483648", "--hidden-size 2147483648",
                                   "--num-attention-heads 0", "--train-iters 0",
                                   "--hidden-dropout 1", "--rotary-percent 1.5", "--adam-eps 0"])  # fmt: skip
def test_value_out_of_range_is_the_only_complaint_about_it(flags: str):
    (problem,) = problems(flags, 2)
    assert problem.startswith(f"given {flags}")


def test_parts_are_what_validate_adds_up():
    config = given(f"{TP}", "3")
    filled = resolve(config, 3)
    parts = [*missing_problems(config), *model_problems(filled.model), *layout_problems(filled, 3)]
    parts += training_problems(config, filled)
    assert config_problems(config, 3) == parts


def test_problems_about_a_doubtful_flag_are_left_out():
    about_lr = Problem("no --lr", "the peak learning rate", "add --lr")
    about_min = Problem("--min-lr 3", "less", "--min-lr")
    assert without_repeats([about_lr, about_min], ["--lr"]) == [about_min]
