"""Least and largest values of single settings, and which of them must be given; rules over several are elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.core.config.errors import Problem
from megatron.core.config.fields import spelling_of
from megatron.core.config.numbers import MOST_RANKS
from megatron.training.config.data import NO_SOURCE
from megatron.training.config.run import RunConfig

REQUIRED = (
    ("model", "hybrid_layer_pattern", "the layers in order, for instance --hybrid-layer-pattern 'M-M*E'"),
    ("model", "hidden_size", "the width of the model"),
    ("model", "seq_length", "the tokens per sequence"),
    ("training", "micro_batch_size", "the sequences per rank in one forward pass"),
    ("optimizer", "lr", "the peak learning rate"),
)
"""Settings without a default: group, field, what it is."""

LEAST = {
    "model": {
        "hidden_size": 1,
        "ffn_hidden_size": 1,
        "seq_length": 1,
        "num_attention_heads": 1,
        "num_query_groups": 1,
        "kv_channels": 1,
        "rotary_base": 1,
        "mamba_num_heads": 1,
        "mamba_head_dim": 1,
        "mamba_state_dim": 1,
        "mamba_num_groups": 1,
        "num_moe_experts": 0,
        "moe_ffn_hidden_size": 1,
        "moe_router_topk": 1,
        "moe_router_bias_update_rate": 0,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_aux_loss_coeff": 0,
        "moe_z_loss_coeff": 0,
        "moe_shared_expert_intermediate_size": 1,
        "moe_latent_size": 1,
        "mtp_num_layers": 0,
        "recompute_num_layers": 1,
        "mtp_loss_scaling_factor": 0,
        "init_method_std": 0,
        "embedding_init_method_std": 0,
    },
    "parallel": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "logical_data_parallel_size": 1,
        "logical_reduce_block_size": 1,
    },
    "optimizer": {"lr": 0, "min_lr": 0, "weight_decay": 0, "clip_grad": 0},
    "scheduler": {
        "lr_decay_iters": 1,
        "lr_decay_samples": 1,
        "lr_warmup_iters": 0,
        "lr_warmup_samples": 0,
        "lr_warmup_init": 0,
        "lr_wsd_decay_iters": 1,
        "lr_wsd_decay_samples": 1,
        "start_weight_decay": 0,
        "end_weight_decay": 0,
    },
    "ddp": {"ddp_bucket_size": 1, "ddp_num_buckets": 1},
    "training": {
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "train_iters": 1,
        "train_samples": 1,
        "eval_iters": 0,
        "eval_interval": 1,
        "start_eval_at_iter": 0,
        "eval_global_batch_size": 1,
        "eval_micro_batch_size": 1,
        "manual_gc_interval": 0,
        "exit_interval": 1,
        "exit_duration_in_mins": 1,
        "check_weight_hash_across_dp_replicas_interval": 1,
        "replay_check_interval": 1,
    },
    "checkpoint": {"save_interval": 1, "save_retain_interval": 1, "ckpt_step": 0, "override_ckpt_iteration": 0},
    "distributed": {"distributed_timeout_minutes": 1},
    "logging": {"log_interval": 1, "tensorboard_log_interval": 1},
    "fingerprint": {"fingerprint_interval": 1},
}
"""Least value of a setting, by group and field."""

_WIDEST, _MOST_PARTS, _MOST_DEPTHS, _MOST_IDS = 2**20, 2**16, 2**10, 2**31 - 1
MOST: dict[str, dict[str, int]] = {
    "model": {
        "hidden_size": _WIDEST,
        "ffn_hidden_size": _WIDEST,
        "kv_channels": _WIDEST,
        "mamba_head_dim": _WIDEST,
        "mamba_state_dim": _WIDEST,
        "moe_ffn_hidden_size": _WIDEST,
        "moe_shared_expert_intermediate_size": _WIDEST,
        "moe_latent_size": _WIDEST,
        "num_attention_heads": _MOST_PARTS,
        "num_query_groups": _MOST_PARTS,
        "mamba_num_heads": _MOST_PARTS,
        "mamba_num_groups": _MOST_PARTS,
        "num_moe_experts": _MOST_PARTS,
        "mtp_num_layers": _MOST_DEPTHS,
        "max_position_embeddings": _MOST_IDS,
    },
    "tokenizer": {
        "vocab_size": _MOST_IDS,
        "make_vocab_size_divisible_by": _MOST_IDS,
        "padded_vocab_size": _MOST_IDS,
        "tiktoken_num_special_tokens": _WIDEST,
    },
    "training": {"global_batch_size": 2**20, "eval_global_batch_size": 2**20},
}
"""Largest value of a setting, by group and field: far more than anybody has. What is planned by the piece (experts,
depths, steps of a growing batch) ends in time, no weight has more bytes than 64 bits count, ids fit int32."""

MOST_FACTOR = 1000
FACTORS: dict[str, tuple[str, ...]] = {
    "model": (
        "moe_router_topk_scaling_factor",
        "moe_router_bias_update_rate",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "mtp_loss_scaling_factor",
        "init_method_std",
        "embedding_init_method_std",
    ),
    "optimizer": ("lr", "min_lr", "weight_decay"),
    "scheduler": ("lr_warmup_init", "start_weight_decay", "end_weight_decay"),
}
"""Rates, coefficients and deviations: at most ``MOST_FACTOR``. Much more makes squares overflow, and what is divided by
them 0: such a run goes on without a word."""

ABOVE_ZERO: dict[str, tuple[str, ...]] = {"model": ("moe_router_topk_scaling_factor",)}
"""Settings that must be larger than 0."""

UP_TO_ONE: dict[str, tuple[str, ...]] = {"model": ("layernorm_epsilon", "rotary_percent"), "optimizer": ("adam_eps",)}
"""Settings that must be larger than 0 and at most 1."""

BELOW_ONE: dict[str, tuple[str, ...]] = {
    "model": ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps"),
    "optimizer": ("adam_beta1", "adam_beta2", "sgd_momentum"),
    "scheduler": ("lr_warmup_fraction",),
}
"""Shares and rates: at least 0 and less than 1."""

_TABLES: tuple[tuple[dict[str, tuple[str, ...]], str, Callable[[Any], bool]], ...] = (
    (FACTORS, f"at most {MOST_FACTOR}", lambda value: value <= MOST_FACTOR),
    (ABOVE_ZERO, "more than 0", lambda value: value > 0),
    (UP_TO_ONE, "more than 0 and at most 1", lambda value: 0 < value <= 1),
    (BELOW_ONE, "at least 0 and less than 1", lambda value: 0 <= value < 1),
)

MAX_SEED = 2**32 - 1
"""The order of the samples comes from NumPy's generator, which takes no larger seed."""


def given_text(config: RunConfig, group: str, name: str) -> str:
    """A setting as the command line would have it: ``--seed 7``."""
    value = getattr(getattr(config, group), name)
    return f"{flag_of(config, group, name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def flag_of(config: RunConfig, group: str, name: str) -> str:
    """The flag of a setting."""
    return spelling_of(type(getattr(config, group)), name)


def missing_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings without a default that were not given. A dry run needs no data."""
    for group, name, what in REQUIRED:
        if getattr(getattr(config, group), name) is None:
            flag = flag_of(config, group, name)
            yield Problem(f"no {flag}", what, f"add {flag}")
    if not config.data.given_sources() and not config.distributed.dry_run:
        yield NO_SOURCE


def range_problems(config: RunConfig) -> dict[tuple[str, str], Problem]:
    """Settings out of their range, by group and field."""
    found: dict[tuple[str, str], Problem] = {}

    def check(group: str, name: str, needed: str, holds: Callable[[Any], bool]) -> None:
        value = getattr(getattr(config, group), name)
        if value is not None and not all(map(holds, value if isinstance(value, tuple) else (value,))):
            found[group, name] = Problem(given_text(config, group, name), needed, flag_of(config, group, name))

    for group, limits in LEAST.items():
        for name, least in limits.items():
            check(group, name, f"at least {least}", functools.partial(operator.le, least))
    for group, limits in MOST.items():
        for name, most in limits.items():
            check(group, name, f"at most {most}", functools.partial(operator.ge, most))
    for table, needed, rule in _TABLES:
        for group, names in table.items():
            for name in names:
                check(group, name, needed, rule)
    check("distributed", "dry_run_world_size", f"1 to {MOST_RANKS}", lambda value: 1 <= value <= MOST_RANKS)
    check("training", "seed", f"1 to {MAX_SEED}", lambda value: 1 <= value <= MAX_SEED)
    return found


def with_defaults(config: RunConfig, fields: Iterable[tuple[str, str]]) -> RunConfig:
    """The configuration with the given fields, (group, name), back at their defaults."""
    for group, name in fields:
        part = getattr(config, group)
        default = next(f.default for f in dataclasses.fields(part) if f.name == name)
        config = dataclasses.replace(config, **{group: dataclasses.replace(part, **{name: default})})
    return config
