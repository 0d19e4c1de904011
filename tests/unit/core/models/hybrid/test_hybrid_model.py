"""HybridChunk on one rank: names, sizes, decay groups, stage borders, loss, types."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.contracts.batch import Batch, Microbatch
from megatron.core.contracts.stage import BalancedRouter, Stage
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from megatron.core.rng.initial_values import draw_parameter
from tests.support.ranks import groups_for_test
from tests.support.tiny import (
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Layout,
    attach_main_grads,
    relative_error,
    run_microbatches,
    tiny_batch,
    tiny_config,
    tiny_context,
    tiny_gradients,
)

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)
NOISE = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}


def _chunks(dtype: torch.dtype = torch.float32, **changes: Any) -> list[HybridChunk]:
    return build_hybrid_chunks(tiny_config(**changes), tiny_context(groups_for_test(), dtype=dtype), VOCAB_SIZE)


def test_module_paths_are_global_names() -> None:
    for chunk in _chunks(hybrid_layer_pattern="M|E*|-"):
        assert [name for name, _ in chunk.named_parameters()] == [p.spec.name for p in chunk.model_parameters()]


def test_parameter_count_follows_the_formulas() -> None:
    config = tiny_config()
    h, f, x, s = 64, 256, 64, 128
    inner, bc, heads = 8 * 16, 2 * 16, 8
    conv = inner + 2 * bc
    mamba = h * (2 * inner + 2 * bc + heads) + h + 4 * conv + conv + 3 * heads + inner + inner * h
    attention = h * (4 + 2 * 2) * 16 + 4 * 16 * h + h
    experts = h + 4 * h + 4 * 2 * x * h + 2 * h * s
    total = 2 * mamba + attention + 2 * experts + 2 * h * f + h + h + 2 * VOCAB_SIZE * h
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups_for_test()), VOCAB_SIZE)
    assert sum(p.numel() for p in chunk.model_parameters()) == total


def test_parameter_count_of_a_published_model() -> None:
    """Fourteen layers of Nemotron 3 Nano's widths with 32 experts: the number Megatron-LM prints for them."""
    groups = dataclasses.replace(groups_for_test(), device=torch.device("meta"))
    config = tiny_config(
        hybrid_layer_pattern="MEMEM*EMEMEM*E",
        hidden_size=2688,
        num_attention_heads=32,
        kv_channels=128,
        mamba_num_heads=64,
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=8,
        num_moe_experts=32,
        moe_router_topk=6,
        moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712,
    )
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups, padded_vocab_size=131072), 131072)
    assert sum(p.numel() for p in chunk.model_parameters()) == 3_019_928_064


@pytest.mark.parametrize("protocol", [Stage, BalancedRouter])
def test_chunks_and_routers_offer_what_the_engine_asks_for(protocol: type) -> None:
    (chunk,) = _chunks()
    target = chunk if protocol is Stage else next(chunk.balanced_routers())
    asked = {name for name in (*protocol.__annotations__, *vars(protocol)) if not name.startswith("_")}
    assert len(asked) >= 4
    assert all(hasattr(target, name) for name in asked)


def test_what_decays() -> None:
    (chunk,) = _chunks(
        normalization="LayerNorm",
        add_bias_linear=True,
        moe_shared_expert_intermediate_size=None,
        position_embedding_type="learned_absolute",
    )
    decays = {p.spec.name: p.spec.weight_decay for p in chunk.model_parameters()}
    kept = ("word_embeddings.weight", "position_embeddings.weight", "conv1d_weight", "router.weight", "proj.weight")
    for name, decay in decays.items():
        last = name.split(".", 2)[-1]
        if last.endswith(("bias", "norm.weight", "norm_weight", "layernorm.weight", "A_log", ".D")):
            assert not decay, name
        elif last.endswith(kept) or "linear_" in name or name == "output_layer.weight":
            assert decay, name
    assert decays["embedding.word_embeddings.weight"]


def test_embedding_with_a_deviation_of_its_own_does_not_decay() -> None:
    (chunk,) = _chunks(embedding_init_method_std=1.0)
    weight = chunk.embedding.word_embeddings.weight
    assert not weight.spec.weight_decay
    assert weight.std().item() == pytest.approx(1.0, abs=0.02)


def test_initial_values() -> None:
    (chunk,) = _chunks()
    params = {p.spec.name: p.detach() for p in chunk.model_parameters()}
    into, back = params["decoder.layers.5.mlp.linear_fc1.weight"], params["decoder.layers.5.mlp.linear_fc2.weight"]
    assert into.std().item() == pytest.approx(0.1, rel=0.05)
    assert back.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.05)
    mixer = {name.rpartition(".")[2]: value for name, value in params.items() if ".0.mixer." in name}
    assert mixer["A_log"].min() >= 0.0
    assert mixer["A_log"].max() <= torch.log(torch.tensor(16.0))
    steps = torch.nn.functional.softplus(mixer["dt_bias"])
    assert steps.min() >= 1e-4
    assert steps.max() <= 0.1001
    assert mixer["D"].eq(1.0).all()
    assert mixer["conv1d_weight"].abs().max() <= 0.5


def test_masters_are_drawn_again_exactly() -> None:
    (chunk,) = _chunks(torch.bfloat16)
    for param in chunk.model_parameters():
        drawn = torch.empty(param.spec.local_shape)
        draw_parameter(param.spec, SEED, drawn)
        assert same_bits(drawn.to(param.dtype), param.detach()), param.spec.name
        assert param.dtype == (torch.float32 if param.spec.fp32 else torch.bfloat16)


@pytest.mark.parametrize("pattern", ["ME|*E|M-", "|ME*|EM-", "ME*EM-|", "M|E|*|E|M|-"])
def test_stage_borders_change_no_bit(pattern: str) -> None:
    whole = tiny_gradients(Layout(), 1, NOISE, 2)
    cut = tiny_gradients(Layout(), 1, {**NOISE, "hybrid_layer_pattern": pattern}, 2)
    assert cut.losses == whole.losses
    assert cut.aux == whole.aux
    assert all(same_bits(cut.grads[name], grad) for name, grad in whole.grads.items())


def test_boundary_is_what_travels() -> None:
    first, second = _chunks(torch.bfloat16, hybrid_layer_pattern="M|*", fp32_residual_connection=True)
    sent, _ = first(tiny_batch(0, 0), None, MICROBATCH)
    assert tuple(sent.shape) == first.boundary_shape(1, SEQ_LENGTH)
    assert sent.dtype == first.boundary_dtype == torch.float32
    loss, report = second(tiny_batch(0, 0), sent, MICROBATCH)
    assert loss.dtype == report.loss_sum.dtype == torch.float32
    assert report.num_tokens.dtype == torch.int64


def _with_mask(batch: Batch, mask_BS: torch.Tensor) -> Batch:
    return Batch(
        tokens_BS=batch.tokens_BS,
        labels_BS=batch.labels_BS,
        loss_mask_BS=mask_BS,
        position_ids_BS=batch.position_ids_BS,
    )


def test_no_valid_token_gives_zero_loss_and_finite_gradients() -> None:
    chunks = _chunks(moe_aux_loss_coeff=(0.0,))
    params = attach_main_grads(chunks)
    batch = _with_mask(tiny_batch(0, 0), torch.zeros(1, SEQ_LENGTH))
    loss, report = chunks[0](batch, None, MICROBATCH)
    loss.backward()
    assert loss.item() == 0.0
    assert report.num_tokens.item() == 0
    assert all(not p.main_grads[0].any() for p in params)


def test_no_valid_token_with_a_loss_per_token() -> None:
    """Aux losses too weigh nothing where every token is masked."""
    chunks = _chunks(calculate_per_token_loss=True, moe_aux_loss_coeff=(1.0,), moe_z_loss_coeff=1.0)
    params = attach_main_grads(chunks)
    loss, _ = chunks[0](_with_mask(tiny_batch(0, 0), torch.zeros(1, SEQ_LENGTH)), None, MICROBATCH)
    loss.backward()
    assert all(not p.main_grads[0].any() for p in params)


def test_losses_per_token_add_up_to_one_mean() -> None:
    """Two micro-batches with unequally many valid tokens, divided by all of them, are one micro-batch of both."""
    halves = [tiny_batch(0, 0), tiny_batch(0, 1)]
    halves[1] = _with_mask(halves[1], (torch.arange(SEQ_LENGTH) < 10).float().unsqueeze(0))
    names = ("tokens_BS", "labels_BS", "loss_mask_BS", "position_ids_BS")
    both = Batch(**{name: torch.cat([getattr(half, name) for half in halves]) for name in names})
    grads = []
    for per_token, batches in ((True, halves), (False, [both])):
        chunks = _chunks(calculate_per_token_loss=per_token, moe_aux_loss_coeff=(0.0,), hybrid_layer_pattern="ME*")
        params = attach_main_grads(chunks)
        for index, batch in enumerate(batches):
            place = Microbatch(iteration=1, shard=0, index=index, num_microbatches=len(batches))
            chunks[0](batch, None, place)[0].backward()
        tokens = both.loss_mask_BS.sum() if per_token else 1.0
        grads.append({p.spec.name: p.main_grads[0] / tokens for p in params})
    for name, grad in grads[1].items():
        assert relative_error(grads[0][name], grad) < 1e-5, name


def test_masked_tokens_do_not_enter_the_loss() -> None:
    (chunk,) = _chunks()
    batch = tiny_batch(0, 0)
    labels = torch.where(batch.loss_mask_BS > 0, batch.labels_BS, 0)
    other = Batch(
        tokens_BS=batch.tokens_BS,
        labels_BS=labels,
        loss_mask_BS=batch.loss_mask_BS,
        position_ids_BS=batch.position_ids_BS,
    )
    assert same_bits(chunk(batch, None, MICROBATCH)[0].detach(), chunk(other, None, MICROBATCH)[0].detach())


@pytest.mark.parametrize("changes", [{}, {"fp32_residual_connection": True}, {"normalization": "LayerNorm"}])
def test_bfloat16_stays_near_fp32(changes: dict[str, Any]) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        chunks = _chunks(dtype, **changes)
        params = attach_main_grads(chunks)
        losses.append(run_microbatches(chunks, [(0, 0)], 1, 1)[0][0, 0][0])
        assert all(p.main_grads[0].dtype == torch.float32 and p.grad is None for p in params)
        assert all(p.main_grads[0].isfinite().all() and p.main_grads[0].any() for p in params)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_noise_depends_on_logical_coordinates_alone() -> None:
    def loss(**place: int) -> float:
        (chunk,) = _chunks(**NOISE)
        torch.manual_seed(place["iteration"])
        microbatch = Microbatch(**{"shard": 0, "index": 0, "num_microbatches": 1, **place})
        return chunk(tiny_batch(0, 0), None, microbatch)[0].item()

    base = loss(iteration=3)
    assert loss(iteration=3) == base
    assert len({base, loss(iteration=4), loss(iteration=3, shard=1), loss(iteration=3, index=1)}) == 4


def test_a_pass_moves_no_generator() -> None:
    (chunk,) = _chunks(**NOISE)
    before = torch.get_rng_state()
    chunk(tiny_batch(0, 0), None, MICROBATCH)[0].backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_has_no_noise_and_counts_nothing() -> None:
    (noisy,), (plain,) = _chunks(**NOISE), _chunks()
    quiet = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1, training=False)
    loss, report = noisy(tiny_batch(0, 0), None, quiet)
    assert same_bits(loss.detach(), plain(tiny_batch(0, 0), None, quiet)[0].detach())
    assert not report.per_layer
    assert not any(router.token_counts_E.any() for router in noisy.balanced_routers())


def test_depths_that_are_not_the_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="2 prediction depths, the pattern has 1 parts"):
        _chunks(hybrid_layer_pattern="M/*E", mtp_num_layers=2)
