"""Rules about the model's shape alone: widths, heads, experts, activations, positions."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import Problem
from megatron.core.config.transformer import TransformerConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import ATTENTION, FLAG, MAMBA, MOE, HybridPattern
from megatron.training.config.resolve import pattern_of


def model_problems(model: TransformerConfig) -> list[Problem]:
    """Everything about a model whose single values are in range that cannot be built or trained."""
    pattern = pattern_of(model)
    problems = [*_width_problems(model), *_activation_problems(model), *_position_problems(model)]
    problems += _recompute_problems(model)
    if pattern is not None:
        problems += _pattern_problems(model, pattern)
        if pattern.count(ATTENTION):
            problems += _attention_problems(model)
        if pattern.count(MAMBA):
            problems += _mamba_problems(model)
        if pattern.count(MOE):
            problems += [*_expert_problems(model), *_routing_problems(model), *_auxiliary_problems(model)]
    return problems


def _pattern_problems(model: TransformerConfig, pattern: HybridPattern) -> Iterator[Problem]:
    if model.prediction_depths != len(pattern.mtp):
        yield Problem(
            f"--mtp-num-layers {model.mtp_num_layers} with {FLAG} {model.hybrid_layer_pattern!r}",
            "the layers of each depth: one / part per depth",
            f"add / parts to {FLAG}, or --mtp-hybrid-override-pattern",
        )
    if pattern.mtp and model.position_embedding_type == "learned_absolute":
        yield Problem(
            f"{len(pattern.mtp)} / parts in {FLAG} with --position-embedding-type learned_absolute (the default)",
            "rope or none: the tokens ahead have no learned positions",
            "--position-embedding-type",
        )
    if pattern.count(MOE) and model.num_moe_experts is None:
        count = pattern.count(MOE)
        given = f"{count} E layer{'s' * (count != 1)} in {FLAG} without --num-experts (or with 0)"
        yield Problem(given, "experts", "--num-experts to 1 or more")
    if model.num_moe_experts is None and model.moe_ffn_hidden_size is not None:
        yield Problem(
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} without experts", "--num-experts", "add --num-experts"
        )


def _width_problems(model: TransformerConfig) -> Iterator[Problem]:
    if model.ffn_hidden_size == 0:
        yield Problem(
            f"--swiglu with --hidden-size {model.hidden_size}, which gives an inner width of 0",
            "at least 1",
            "add --ffn-hidden-size",
        )


def _activation_problems(model: TransformerConfig) -> Iterator[Problem]:
    if model.squared_relu and model.swiglu:
        yield Problem("--squared-relu and --swiglu", "one activation", "leave out one of the two")


def _recompute_problems(model: TransformerConfig) -> Iterator[Problem]:
    kind, method, layers = model.recompute_granularity, model.recompute_method, model.recompute_num_layers
    if kind == "full" and (method is None or layers is None):
        yield Problem(
            "--recompute-granularity full without saying which layers together",
            "--recompute-method and --recompute-num-layers",
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    if kind != "full" and (method is not None or layers is not None):
        yield Problem(
            "--recompute-method or --recompute-num-layers without --recompute-granularity full",
            "whole layers that are recomputed",
            "leave them out, or --recompute-granularity full",
        )
    if kind != "selective" and model.recompute_modules is not None:
        yield Problem(
            f"--recompute-modules {' '.join(model.recompute_modules)} without --recompute-granularity selective",
            "--recompute-granularity selective",
            "--recompute-granularity selective, or leave out --recompute-modules",
        )


def _position_problems(model: TransformerConfig) -> Iterator[Problem]:
    longest, length = model.max_position_embeddings, model.seq_length
    if longest is not None and length is not None and longest < length:
        yield Problem(
            f"--max-position-embeddings {longest} with --seq-length {length}",
            f"at least the sequence length, {length}",
            "--max-position-embeddings or --seq-length",
        )


def _attention_problems(model: TransformerConfig) -> Iterator[Problem]:
    heads = model.num_attention_heads
    if heads is None:
        yield Problem(
            f"attention layers (*) in {FLAG} without --num-attention-heads",
            "the number of query heads",
            "add --num-attention-heads",
        )
        return
    if model.kv_channels is None and model.hidden_size is not None:
        yield Problem(
            f"--hidden-size {model.hidden_size} with --num-attention-heads {heads}",
            f"a width that {heads} heads divide, or the width of a head",
            "add --kv-channels, or change one of the two",
        )
    groups = model.key_value_groups
    if groups is not None and heads % groups:
        yield Problem(
            f"--num-attention-heads {heads} with --num-query-groups {groups}",
            f"a number of heads that {groups} groups divide",
            "--num-query-groups or --num-attention-heads",
        )
    if model.position_embedding_type == "rope" and model.kv_channels is not None:
        rotated = int(model.kv_channels * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield Problem(
                f"--kv-channels {model.kv_channels} with --rotary-percent {model.rotary_percent}, which rotates "
                f"{rotated} channels of a head",
                "an even number of channels, at least 2",
                "--rotary-percent or --kv-channels",
            )


def _mamba_problems(model: TransformerConfig) -> Iterator[Problem]:
    heads, groups = model.mamba_num_heads, model.mamba_num_groups
    if heads is None:
        if model.hidden_size is not None:
            yield Problem(
                f"--hidden-size {model.hidden_size} with --mamba-head-dim {model.mamba_head_dim}",
                f"2 * {model.hidden_size} = {2 * model.hidden_size} to be a multiple of {model.mamba_head_dim}, or the "
                "number of heads",
                "add --mamba-num-heads, or change --mamba-head-dim",
            )
    elif heads % groups:
        yield Problem(
            f"{heads} mixer heads (--mamba-num-heads) with --mamba-num-groups {groups}",
            f"a number of heads that {groups} groups divide",
            "--mamba-num-groups or --mamba-num-heads",
        )


def _expert_problems(model: TransformerConfig) -> Iterator[Problem]:
    experts, k = model.num_moe_experts, model.moe_router_topk
    if experts is not None and k > experts:
        yield Problem(f"--moe-router-topk {k} with --num-experts {experts}", f"at most {experts}", "--moe-router-topk")
    softmax = model.moe_router_score_function == "softmax"
    if softmax and k == 1 and not model.moe_router_pre_softmax:
        yield Problem(
            "--moe-router-topk 1 with a softmax over the chosen expert alone, whose weight is always 1",
            "a score that the router can learn from",
            "add --moe-router-pre-softmax, or --moe-router-score-function sigmoid",
        )
    if softmax and model.moe_router_enable_expert_bias:
        yield Problem(
            "--moe-router-enable-expert-bias with --moe-router-score-function softmax",
            "independent scores: the bias chooses experts, scores weigh them",
            "--moe-router-score-function sigmoid or sqrtsoftplus",
        )
    if not softmax and model.moe_router_pre_softmax:
        yield Problem(
            f"--moe-router-pre-softmax with --moe-router-score-function {model.moe_router_score_function}",
            "softmax scores",
            "leave out --moe-router-pre-softmax",
        )
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        yield Problem(
            "--moe-shared-expert-intermediate-size with biases in the linear layers (the default)",
            "shared experts without biases",
            "add --disable-bias-linear",
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        yield Problem(
            "--moe-shared-expert-gate without shared experts",
            "--moe-shared-expert-intermediate-size",
            "add --moe-shared-expert-intermediate-size, or leave out the gate",
        )
    if model.add_bias_linear and model.moe_latent_size is not None:
        yield Problem(
            "--moe-latent-size with biases in the linear layers (the default)",
            "latent projections without biases",
            "add --disable-bias-linear",
        )


def _routing_problems(model: TransformerConfig) -> Iterator[Problem]:
    experts, k = model.num_moe_experts, model.moe_router_topk
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if (groups is None) != (best is None):
        flags = [("--moe-router-num-groups", groups), ("--moe-router-group-topk", best)]
        (there, value), (lacking, _) = flags if best is None else reversed(flags)
        yield Problem(
            f"{there} {value} without {lacking}",
            "the number of groups and how many of them a token may use",
            f"add {lacking}, or leave out {there}",
        )
    elif groups is not None and best is not None and experts is not None:
        given = f"--moe-router-num-groups {groups} and --moe-router-group-topk {best}"
        if experts % groups or best > groups or k % best:
            yield Problem(
                f"{given} with --num-experts {experts} and --moe-router-topk {k}",
                "groups that divide the experts, no more of them used than there are, and these a divisor of the topk",
                "--moe-router-num-groups or --moe-router-group-topk",
            )
        elif best * (experts // groups) < k:
            yield Problem(f"{given}, {best * (experts // groups)} experts", f"at least {k}", "--moe-router-group-topk")
    if model.moe_expert_capacity_factor == 0:
        yield Problem("--moe-expert-capacity-factor 0", "more than 0", "--moe-expert-capacity-factor")
    if model.moe_pad_expert_input_to_capacity and model.moe_expert_capacity_factor is None:
        yield Problem(
            "--moe-pad-expert-input-to-capacity without a capacity",
            "--moe-expert-capacity-factor",
            "add --moe-expert-capacity-factor, or leave out the padding",
        )


def _auxiliary_problems(model: TransformerConfig) -> Iterator[Problem]:
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    shown = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    if len(set(kinds)) < len(kinds) or ("none" in kinds and len(kinds) > 1):
        yield Problem(shown, "distinct losses, or none alone", "--moe-router-load-balancing-type")
    if len(kinds) != len(coefficients):
        yield Problem(
            f"{shown} with --moe-aux-loss-coeff {' '.join(map(str, coefficients))}",
            "one coefficient for each loss",
            "--moe-aux-loss-coeff",
        )
