"""Names and shapes of a hybrid model here and in Hugging Face's Nemotron-H files, in both directions.

``to_hub(weights, model)`` turns global tensors by their names here into those of the published files (``backbone.``
prefix, experts one by one, queries, keys and values apart, no padding rows), ``from_hub`` turns them back.
``hub_config`` makes the fields of ``config.json``. The router's bias has the name ``<router>.expert_bias`` here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.mamba import CHUNK_SIZE, CONV_WIDTH
from megatron.core.config.transformer import TransformerConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import ATTENTION, DENSE, MAMBA, MOE, parse_pattern

Weights = Mapping[str, torch.Tensor]

ENDS = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Outside the layers: here, there."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per token id; only here with rows that pad."""

QKV = "self_attention.linear_qkv.weight"
EXPERTS = {"mlp.experts.linear_fc1.weight": "up_proj", "mlp.experts.linear_fc2.weight": "down_proj"}
"""What is not merely renamed: one tensor here, several there."""

LAYERS = {
    MAMBA: {
        "mixer.in_proj.layer_norm_weight": "norm.weight",
        "mixer.in_proj.weight": "mixer.in_proj.weight",
        "mixer.conv1d_weight": "mixer.conv1d.weight",
        "mixer.conv1d_bias": "mixer.conv1d.bias",
        "mixer.A_log": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.dt_bias": "mixer.dt_bias",
        "mixer.norm.weight": "mixer.norm.weight",
        "mixer.out_proj.weight": "mixer.out_proj.weight",
    },
    ATTENTION: {
        "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
        "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    },
    DENSE: {
        "mlp.linear_fc1.layer_norm_weight": "norm.weight",
        "mlp.linear_fc1.weight": "mixer.up_proj.weight",
        "mlp.linear_fc2.weight": "mixer.down_proj.weight",
    },
    MOE: {
        "pre_mlp_layernorm.weight": "norm.weight",
        "mlp.router.weight": "mixer.gate.weight",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.fc1_latent_proj.weight": "mixer.fc1_latent_proj.weight",
        "mlp.fc2_latent_proj.weight": "mixer.fc2_latent_proj.weight",
        "mlp.shared_experts.linear_fc1.weight": "mixer.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc2.weight": "mixer.shared_experts.down_proj.weight",
    },
}
"""Per kind of layer, behind ``decoder.layers.N.`` and ``backbone.layers.N.``."""

BLOCK_TYPES = {MAMBA: "linear_attention", ATTENTION: "full_attention", DENSE: "mlp", MOE: "moe"}
"""Names of the kinds in ``layers_block_type``."""

_OURS = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_THEIRS = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_THEIR_EXPERT = re.compile(r"mixer\.experts\.(\d+)\.(up_proj|down_proj)\.weight")


def to_hub(weights: Weights, model: TransformerConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors under the names of the published files, as views where nothing has to be put together.

    Raises:
        ValueError: a name that no layer of the pattern has.
    """
    layers, found = parse_pattern(model.hybrid_layer_pattern).layers, dict[str, torch.Tensor]()
    for name, value in weights.items():
        at = _OURS.fullmatch(name)
        if at is None:
            found[_renamed(name, ENDS)] = value[:vocab_size] if name in VOCABULARY else value
            continue
        place, rest = f"backbone.layers.{at[1]}", at[2]
        if rest == QKV:
            found |= {f"{place}.mixer.{part}.weight": rows for part, rows in _split_qkv(value, model).items()}
        elif rest in EXPERTS:
            names = (f"{place}.mixer.experts.{e}.{EXPERTS[rest]}.weight" for e in range(len(value)))
            found |= dict(zip(names, value, strict=True))
        else:
            found[f"{place}.{_renamed(rest, LAYERS[layers[int(at[1])]])}"] = value
    return found


def from_hub(weights: Weights, model: TransformerConfig, padded_vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors under our names; rows that pad the vocabulary are zero.

    Raises:
        ValueError: a name that no layer of the pattern has.
        KeyError: a part of a tensor that is put together is missing.
    """
    layers, found = parse_pattern(model.hybrid_layer_pattern).layers, dict[str, torch.Tensor]()
    for name, value in weights.items():
        at = _THEIRS.fullmatch(name)
        if at is None:
            ours = _renamed(name, {theirs: ours for ours, theirs in ENDS.items()})
            found[ours] = _padded(value, padded_vocab_size) if ours in VOCABULARY else value
            continue
        place, rest = f"decoder.layers.{at[1]}", at[2]
        symbol, there = layers[int(at[1])], f"backbone.layers.{at[1]}.mixer"
        expert = _THEIR_EXPERT.fullmatch(rest)
        if symbol == ATTENTION and rest == "mixer.q_proj.weight":
            parts = [weights[f"{there}.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
            found[f"{place}.{QKV}"] = _join_qkv(parts, model)
        elif expert is not None and expert[1] == "0":
            ours = next(ours for ours, theirs in EXPERTS.items() if theirs == expert[2])
            ids = range(model.num_moe_experts)
            found[f"{place}.{ours}"] = torch.stack([weights[f"{there}.experts.{e}.{expert[2]}.weight"] for e in ids])
        elif expert is None and rest not in ("mixer.k_proj.weight", "mixer.v_proj.weight"):
            found[f"{place}.{_renamed(rest, {theirs: ours for ours, theirs in LAYERS[symbol].items()})}"] = value
    return found


def _renamed(name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise ValueError(f"{name} has no counterpart; known are {', '.join(names)}")
    return names[name]


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])


def _split_qkv(qkv: torch.Tensor, model: TransformerConfig) -> dict[str, torch.Tensor]:
    """Rows are, group after group, the group's query heads, its key, its value."""
    groups, width = model.key_value_groups, model.kv_channels
    per_group = model.num_attention_heads // groups
    blocks = qkv.view(groups, per_group + 2, width, -1)
    parts = {"q_proj": blocks[:, :per_group], "k_proj": blocks[:, per_group], "v_proj": blocks[:, per_group + 1]}
    return {name: part.reshape(-1, qkv.shape[1]) for name, part in parts.items()}


def _join_qkv(parts: list[torch.Tensor], model: TransformerConfig) -> torch.Tensor:
    groups, width = model.key_value_groups, model.kv_channels
    blocks = [part.view(groups, -1, width, part.shape[1]) for part in parts]
    return torch.cat(blocks, dim=1).reshape(-1, parts[0].shape[1])


def hub_config(model: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """Fields of ``config.json`` for ``model_type`` nemotron_h.

    Raises:
        ConfigError: the model has something that Nemotron-H does not; all of it at once.
    """
    problems = list(_problems(model))
    if problems:
        raise ConfigError(problems)
    fields: dict[str, Any] = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [BLOCK_TYPES[symbol] for symbol in parse_pattern(model.hybrid_layer_pattern).layers],
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "mlp_hidden_act": "relu2",
        "initializer_range": model.init_method_std,
        "residual_in_fp32": model.fp32_residual_connection,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_groups,
        "head_dim": model.kv_channels,
        "mamba_num_heads": model.mamba_num_heads,
        "mamba_head_dim": model.mamba_head_dim,
        "ssm_state_size": model.mamba_state_dim,
        "n_groups": model.mamba_num_groups,
        "conv_kernel": CONV_WIDTH,
        "chunk_size": CHUNK_SIZE,
    }
    if model.num_moe_experts:
        fields |= {
            "n_routed_experts": model.num_moe_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "moe_latent_size": model.moe_latent_size,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "norm_topk_prob": model.moe_router_topk > 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        }
    return {name: value for name, value in fields.items() if value is not None}


def _problems(model: TransformerConfig) -> Iterator[Problem]:
    wanted = {
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--squared-relu": model.squared_relu,
        "--disable-bias-linear": not model.add_bias_linear,
        "--position-embedding-type none": model.position_embedding_type == "none",
    }
    if model.num_moe_experts:
        wanted |= {
            "--moe-router-score-function sigmoid": model.moe_router_score_function == "sigmoid",
            "--moe-shared-expert-intermediate-size": bool(model.moe_shared_expert_intermediate_size),
        }
    for flag, holds in wanted.items():
        if not holds:
            yield Problem(f"a model without {flag}", "what Nemotron-H is made of", flag.partition(" ")[0])
    if model.num_moe_experts:
        foreign = {
            "--moe-shared-expert-gate": model.moe_shared_expert_gate,
            "--moe-router-num-groups": (model.moe_router_num_groups or 1) > 1,
        }
        for flag, holds in foreign.items():
            if holds:
                yield Problem(f"a model with {flag}", "what Nemotron-H is made of", flag)
