"""What resolve fills in, by Megatron's rules, and what it leaves to validate."""

from __future__ import annotations

import dataclasses
from dataclasses import fields

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.optimizer import SchedulerConfig
from megatron.core.config.transformer import TransformerConfig
from megatron.core.process_groups.topology import LogicalLayout
from megatron.training.cli.parser import parse
from megatron.training.config.idle import IDLE, idle_notes
from megatron.training.config.resolve import (
    logical_layout,
    num_microbatches,
    pattern_of,
    resolution_notes,
    resolve,
    resolve_vocabulary,
    topology_of,
    vocabulary_without_files,
)
from megatron.training.config.run import RunConfig, config_classes
from tests.support.settings import SMALL, effective, given

# Settings that may stay None, as the docstring of resolve lists them.
MAY_BE_NONE = {
    "embedding_init_method_std",
    "moe_router_dtype",
    "moe_router_topk_scaling_factor",
    "moe_input_jitter_eps",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_expert_capacity_factor",
    "moe_z_loss_coeff",
    "mtp_hybrid_override_pattern",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "ddp_num_buckets",
    "distributed_backend",
    "dry_run_world_size",
    "rampup_batch_size",
    "start_eval_at_iter",
    "step_batch_size_schedule",
    "op_variants",
    "determinism_allow_env",
    "start_weight_decay",
    "end_weight_decay",
    "lr_decay_iters",
    "lr_warmup_fraction",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "eval_interval",
    "exit_interval",
    "exit_duration_in_mins",
    "check_weight_hash_across_dp_replicas_interval",
    "replay_check_interval",
    "tensorboard_dir",
    "run_dir",
    "fingerprint_dir",
    "trace_dir",
    "eval_global_batch_size",
    "eval_micro_batch_size",
    "trace_iterations",
    "trace_dump",
}


def model(**settings) -> TransformerConfig:
    return resolve(RunConfig(model=TransformerConfig(**settings)), 1).model


def test_nothing_else_stays_open():
    config = effective(world_size=4)
    left = {
        field.name
        for group in config_classes()
        if group not in ("data", "tokenizer", "checkpoint")
        for field in dataclasses.fields(getattr(config, group))
        if getattr(getattr(config, group), field.name) is None
    }
    assert left <= MAY_BE_NONE


def test_resolve_is_stable_and_leaves_its_input_alone():
    before = given()
    copy = dataclasses.replace(before)
    once = resolve(before, 2)
    assert before == copy
    assert resolve(once, 2) == once


@pytest.mark.parametrize(("swiglu", "hidden", "expected"), [(False, 64, 256), (True, 4096, 10880), (True, 1024, 2688)])
def test_inner_width(swiglu: bool, hidden: int, expected: int):
    assert model(hidden_size=hidden, swiglu=swiglu).ffn_hidden_size == expected
    assert model(hidden_size=hidden, swiglu=swiglu, ffn_hidden_size=7).ffn_hidden_size == 7


def test_widths_of_heads_and_experts():
    filled = model(hidden_size=96, num_attention_heads=6, mamba_head_dim=32, num_moe_experts=2, ffn_hidden_size=48)
    assert (filled.kv_channels, filled.mamba_num_heads, filled.moe_ffn_hidden_size) == (16, 6, 48)
    assert model(hidden_size=96, num_attention_heads=6, kv_channels=128).kv_channels == 128


def test_what_does_not_divide_stays_open():
    filled = model(hidden_size=100, num_attention_heads=6, mamba_head_dim=64)
    assert (filled.kv_channels, filled.mamba_num_heads) == (None, None)


def test_no_experts_means_none():
    filled = model(hidden_size=8, num_moe_experts=0)
    assert (filled.num_moe_experts, filled.moe_ffn_hidden_size) == (None, None)


def test_pattern_gives_the_number_of_layers_and_a_contradiction_is_said():
    config = given("--num-layers", "9", "--hybrid-layer-pattern", "M-|*E")
    filled = resolve(config, 1)
    assert filled.model.num_layers == 4
    assert resolution_notes(config, filled) == ["--num-layers 9 has no effect: the pattern has 4 layers"]
    assert resolution_notes(given(), resolve(given(), 1)) == []


def test_depths_come_from_the_pattern_and_a_contradiction_is_said():
    config = given("--hybrid-layer-pattern", "M*/E/E", "--mtp-num-layers", "1")
    filled = resolve(config, 1)
    assert (filled.model.mtp_num_layers, filled.model.num_layers) == (2, 2)
    assert resolution_notes(config, filled) == ["--mtp-num-layers 1 has no effect: the pattern has 2 / parts"]
    assert resolve(given(), 1).model.mtp_num_layers == 0


def test_older_spelling_of_depths_is_the_same_recipe():
    older = given("--hybrid-layer-pattern", "M*", "--mtp-hybrid-override-pattern", "E", "--mtp-num-layers", "2")
    assert resolve(older, 1) == resolve(given("--hybrid-layer-pattern", "M*/E/E"), 1)


def test_pattern_that_cannot_be_parsed_is_none():
    assert pattern_of(TransformerConfig()) is None
    assert pattern_of(TransformerConfig(hybrid_layer_pattern="MXM")) is None


def test_position_table_is_as_long_as_a_sequence_unless_given():
    assert model(seq_length=32).max_position_embeddings == 32
    assert model(seq_length=32, max_position_embeddings=64).max_position_embeddings == 64


@pytest.mark.parametrize(
    ("tp", "pp", "world", "ldp", "block"), [(1, 1, 1, 1, 1), (2, 1, 8, 4, 4), (2, 2, 32, 8, 4), (1, 1, 16, 16, 8)]
)
def test_logical_sizes_follow_the_first_launch(tp: int, pp: int, world: int, ldp: int, block: int):
    flags = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    filled = resolve(given(*flags), world).parallel
    assert (filled.logical_data_parallel_size, filled.logical_reduce_block_size) == (ldp, block)
    assert filled.expert_tensor_parallel_size == tp


def test_logical_sizes_that_are_given_stand():
    flags = ["--logical-data-parallel-size", "8", "--logical-reduce-block-size", "2"]
    filled = resolve(given(*flags), 2)
    assert (filled.parallel.logical_data_parallel_size, filled.parallel.logical_reduce_block_size) == (8, 2)
    assert filled.training.global_batch_size == 8


def test_sequence_parallelism_needs_tensor_parallelism():
    assert not resolve(given("--sequence-parallel"), 1).parallel.sequence_parallel
    assert resolve(given("--sequence-parallel", "--tensor-model-parallel-size", "2"), 2).parallel.sequence_parallel


def test_length_in_iterations_and_in_samples():
    by_iterations = resolve(given("--global-batch-size", "8"), 2).training
    assert (by_iterations.train_iters, by_iterations.train_samples) == (3, 24)
    config = given("--train-samples", "85", "--global-batch-size", "8")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=None))
    by_samples = resolve(config, 2).training
    assert (by_samples.train_iters, by_samples.train_samples) == (10, 85)


def scheduler(*flags: str) -> SchedulerConfig:
    return resolve(given("--global-batch-size", "8", "--train-iters", "100", *flags), 1).scheduler


def test_schedule_is_counted_in_samples():
    plain = scheduler()
    assert (plain.lr_decay_samples, plain.lr_warmup_samples, plain.lr_wsd_decay_samples) == (800, 0, None)
    given_lengths = scheduler("--lr-decay-iters", "50", "--lr-warmup-iters", "5", "--lr-wsd-decay-iters", "10")
    assert given_lengths.lr_decay_samples == 400
    assert (given_lengths.lr_warmup_samples, given_lengths.lr_wsd_decay_samples) == (40, 80)
    assert scheduler("--lr-decay-iters", "50", "--lr-warmup-fraction", "0.01").lr_warmup_samples == 4
    assert scheduler("--train-iters", "100", "--lr-warmup-fraction", "0.29").lr_warmup_samples == 232


def test_constant_weight_decay_needs_no_ends():
    filled = resolve(given("--weight-decay", "0.3"), 1).scheduler
    assert (filled.start_weight_decay, filled.end_weight_decay) == (None, None)


def test_bucket_size():
    assert resolve(given(), 1).ddp.ddp_bucket_size == 40_000_000
    assert resolve(given(), 64).ddp.ddp_bucket_size == 64_000_000
    assert resolve(given("--ddp-num-buckets", "3"), 64).ddp.ddp_bucket_size is None


def test_data_source():
    assert resolve(given(), 1).data.split is None
    assert resolve(given("--data-path", "a"), 1).data.split == "969, 30, 1"
    assert resolve(given("--train-data-path", "a"), 1).data.split is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tokenizer-type", "ByteTokenizer"], 258),
        (["--tokenizer-type", "ByteTokenizer", "--vocab-size", "300"], 300),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "509"], 509),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"], None),
    ],
)
def test_vocabulary_known_without_a_file(flags: list[str], expected: int | None):
    assert vocabulary_without_files(given(*flags).tokenizer) == expected


def test_padded_vocabulary_depends_on_tensor_parallelism():
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    assert effective(*flags, world_size=2, vocab_size=258).tokenizer.padded_vocab_size == 512
    with pytest.raises(ConfigError, match="--padded-vocab-size 300"):
        resolve_vocabulary(resolve(given("--padded-vocab-size", "300"), 1), 301)


def test_layout_and_micro_batches():
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "24"]
    flags += ["--micro-batch-size", "2", "--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    config = effective(*flags, world_size=8)
    assert logical_layout(config) == LogicalLayout(
        ldp=4, block=4, tp=2, ep=4, etp=1, padded_vocab_size=512, micro_batch_size=2
    )
    assert num_microbatches(config) == 3
    assert topology_of(config, 8).edp == 2


def test_layout_of_an_unresolved_configuration_is_a_mistake():
    with pytest.raises(ValueError, match="resolve and validate"):
        logical_layout(given())


def idle(*words: str) -> list[str]:
    return idle_notes(parse([*SMALL, *words]).named, effective(*words))


def test_flags_that_wait_for_another_one_are_announced():
    words = ["--save-interval", "3", "--fingerprint-level", "metrics", "--tensorboard-log-interval", "2"]
    assert idle(*words) == [
        "--save-interval has no effect without --save",
        "--fingerprint-level has no effect without --fingerprint-dir",
        "--tensorboard-log-interval has no effect without --tensorboard-dir",
    ]
    words += ["--save", "a", "--fingerprint-dir", "b", "--tensorboard-dir", "c"]
    assert idle(*words) == []


def test_what_was_given_counts_also_where_it_is_the_default():
    assert idle("--fingerprint-interval", "1", "--adam-beta1=0.9", "--position-embedding-type", "learned_absolute") == [
        "--fingerprint-interval has no effect without --fingerprint-dir"
    ]
    assert idle("--exit-signal", "SIGTERM") == ["--exit-signal has no effect without --exit-signal-handler"]
    files = ("--no-mock-data", "--train-data-path", "p", "--test-data-path", "p")
    assert idle(*files) == ["--test-data-path has no effect without --eval-interval"]
    assert idle("--qk-layernorm", "--hybrid-layer-pattern", "M-") == [
        "--qk-layernorm has no effect without an attention layer (*) in --hybrid-layer-pattern",
        "--num-experts has no effect without a mixture of experts (E) in --hybrid-layer-pattern",
    ]
    assert idle("--trace-dir", "t", "--trace-iterations", "4:5") == [
        "--trace-iterations leaves a trace of no iteration without iterations that far (--train-iters)"
    ]
    assert idle("--trace-dir", "t", "--trace-iterations", "3:5") == []
    assert idle("--profile", "--use-pytorch-profiler", "--run-dir", "r") == [
        "--profile has no effect without iterations as far as --profile-step-start (--train-iters)"
    ]
    assert idle("--qk-layernorm", "--no-qk-layernorm", "--hybrid-layer-pattern", "M-E") == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--fingerprint-dir f --fingerprint-interval", "leaves an empty fingerprint"),
        ("--check-weight-hash-across-dp-replicas-interval", "has no effect"),
        ("--tensorboard-dir t --tensorboard-log-interval", "leaves TensorBoard without training curves"),
        ("--deterministic-mode --replay-check-interval", "has no effect"),
        ("--eval-interval 1 --start-eval-at-iter", "leaves out every evaluation of validation data"),
    ],
)
def test_what_begins_beyond_the_run_is_announced(words: str, what: str):
    flag = words.split()[-1]
    assert idle(*words.split(), "4") == [f"{flag} {what} without iterations that far (--train-iters)"]
    assert idle(*words.split(), "3") == []


def test_settings_without_what_they_belong_to_are_announced_together():
    words = ["--hybrid-layer-pattern", "M-M-", "--num-experts", "4", "--moe-router-topk", "1", "--sgd-momentum", "0.5"]
    words += ["--manual-gc-interval", "7", "--exit-signal", "SIGUSR1", "--num-query-groups", "2", "--rotary-base", "9"]
    assert idle(*words) == [
        "--manual-gc-interval has no effect without --manual-gc",
        "--exit-signal has no effect without --exit-signal-handler",
        "--sgd-momentum has no effect without --optimizer sgd",
        "--num-query-groups has no effect without --group-query-attention",
        "--rotary-base has no effect without --position-embedding-type rope",
        "--num-experts, --moe-router-topk have no effect without a mixture of experts (E) in --hybrid-layer-pattern",
    ]


def test_settings_of_training_are_announced_where_there_is_none():
    words = ["--skip-train", "--eval-interval", "1", "--save", "s", "--save-interval", "2", "--fingerprint-dir", "f"]
    without = "without training (--skip-train leaves it out)"
    assert idle(*words, "--exit-interval", "2") == [
        f"--save, --save-interval have no effect {without}",
        f"--fingerprint-dir leaves an empty fingerprint {without}",
        f"--exit-interval has no effect {without}",
    ]


def test_every_idle_rule_names_fields_of_its_group_and_is_silent_by_default():
    everything = given()
    for rule in IDLE:
        assert isinstance(rule.missing(everything), bool)
        own = {field.name for field in fields(getattr(everything, rule.group))}
        assert all(name in own or any(o.startswith(name[:-1]) for o in own) for name in rule.names), rule.needed
    assert idle_notes((), everything) == []
