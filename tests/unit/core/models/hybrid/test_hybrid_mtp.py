"""Multi-token prediction and shared embeddings on one rank: names, what each depth sees, weights of losses, order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.contracts.batch import Batch, Microbatch
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_loss import ahead, masked_sum, mean_of, with_weight
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from megatron.core.models.hybrid.hybrid_mtp import MultiTokenPrediction, PredictionBlock
from tests.support.ranks import groups_for_test
from tests.support.tiny import VOCAB_SIZE, attach_main_grads, tiny_batch, tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)
SHORT = {"hybrid_layer_pattern": "M/*-/*-", "seq_length": 16}


def _chunk(**changes: Any) -> HybridChunk:
    (chunk,) = build_hybrid_chunks(tiny_config(**{**SHORT, **changes}), tiny_context(groups_for_test()), VOCAB_SIZE)
    return chunk


def _batch() -> Batch:
    return tiny_batch(0, 0, seq_length=16)


def _grads(chunk: HybridChunk, microbatch: Microbatch = MICROBATCH) -> dict[str, tuple[torch.Tensor, ...]]:
    params = attach_main_grads([chunk])
    chunk(_batch(), None, microbatch)[0].backward()
    return {p.spec.name: p.main_grads for p in params}


def test_names_are_those_of_the_state_dict() -> None:
    chunk = _chunk()
    assert isinstance(chunk.mtp, MultiTokenPrediction)
    names = {p.spec.name for p in chunk.model_parameters() if p.spec.name.startswith("mtp.")}
    block = (
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "mtp_model_layer.layers.0.self_attention.linear_qkv.weight",
        "mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "mtp_model_layer.layers.0.self_attention.linear_proj.weight",
        "mtp_model_layer.layers.1.mlp.linear_fc1.weight",
        "mtp_model_layer.layers.1.mlp.linear_fc1.layer_norm_weight",
        "mtp_model_layer.layers.1.mlp.linear_fc2.weight",
        "final_layernorm.weight",
    )
    assert names == {f"mtp.layers.{d}.{name}" for d in range(2) for name in block}
    shapes = {p.spec.name: p.spec.shape for p in chunk.model_parameters()}
    assert shapes["mtp.layers.0.eh_proj.weight"] == (64, 128)


def test_repeated_block_is_stored_once() -> None:
    names = {p.spec.name for p in _chunk(mtp_use_repeated_layer=True).model_parameters()}
    assert any(name.startswith("mtp.layers.0.") for name in names)
    assert not any(name.startswith("mtp.layers.1.") for name in names)


def test_depths_see_tokens_labels_and_mask_moved() -> None:
    batch = _batch()
    for depth in (1, 2):
        moved = ahead(batch, depth)
        for got, whole in (
            (moved.tokens_BS, batch.tokens_BS),
            (moved.labels_BS, batch.labels_BS),
            (moved.loss_mask_BS, batch.loss_mask_BS),
        ):
            assert torch.equal(got[:, :-depth], whole[:, depth:])
            assert not got[:, -depth:].any()
    assert not ahead(batch, 20).loss_mask_BS.any()


def test_loss_of_each_depth_by_hand() -> None:
    chunk, batch = _chunk(mtp_loss_scaling_factor=0.3), _batch()
    loss, report = chunk(batch, None, MICROBATCH)
    hidden = chunk.decoder(chunk.embedding(batch, MICROBATCH), MICROBATCH, report)
    expected, mask = report.loss_sum / report.num_tokens, batch.loss_mask_BS[0]
    assert len(report.depths) == 2
    for depth, (loss_sum, tokens) in enumerate(report.depths, 1):
        block = chunk.mtp.layers[str(depth - 1)]
        assert isinstance(block, PredictionBlock)
        words = torch.nn.functional.pad(batch.tokens_BS[0, depth:], (0, depth))
        embedded = chunk.embedding.word_embeddings.weight[words].unsqueeze(1)
        joined = torch.cat((block.enorm(embedded), block.hnorm(hidden)), dim=-1)
        x = joined @ block.eh_proj.weight.t()
        for layer in block.mtp_model_layer.layers.values():
            x = layer(x, MICROBATCH, report)
        hidden = block.final_layernorm(x)
        logits = (hidden @ chunk.output_layer.weight.t()).squeeze(1)
        token_loss = torch.nn.functional.cross_entropy(logits[:-depth], batch.labels_BS[0, depth:], reduction="none")
        assert tokens.item() == mask[depth:].sum().item()
        assert loss_sum.item() == pytest.approx((token_loss * mask[depth:]).sum().item(), rel=1e-5)
        expected = expected + 0.15 * loss_sum / tokens
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_evaluation_predicts_the_next_token_alone() -> None:
    quiet = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1, training=False)
    _, report = _chunk()(_batch(), None, quiet)
    assert not report.depths


def test_gradient_reaches_trunk_and_both_tables() -> None:
    with_mtp, without = _grads(_chunk()), _grads(_chunk(mtp_loss_scaling_factor=0.0))
    first, last = with_mtp["embedding.word_embeddings.weight"]
    assert first.any()
    assert last.any()
    assert not without["embedding.word_embeddings.weight"][1].any()
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert not torch.equal(with_mtp[name][0], without[name][0])


@pytest.mark.parametrize("tied", [True, False])
def test_last_depth_adds_first_and_the_trunk_last(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a shared weight's uses within a micro-batch is part of the contract."""
    chunk = _chunk(untie_embeddings_and_output_weights=not tied)
    order: list[str] = []
    head = chunk.embedding.word_embeddings.weight if tied else chunk.output_layer.weight
    params = attach_main_grads([chunk])
    assert any(p is head for p in params)
    ops = chunk.context.ops
    linear, table, tokens = ops["linear_grad"], ops["embedding_grad"], _batch().tokens_BS[0]

    def linear_grad(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if buffer is head.main_grads[-1]:
            order.append("head")
        return linear(buffer, dy, x)

    def embedding_grad(buffer: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        depth = next(d for d in range(3) if torch.equal(ids[: 16 - d], tokens[d:]))
        order.append(f"table {depth}")
        return table(buffer, dy, ids)

    replaced, original = {"linear_grad": linear_grad, "embedding_grad": embedding_grad}, type(ops).__getitem__
    monkeypatch.setattr(type(ops), "__getitem__", lambda self, name: replaced.get(name) or original(self, name))
    chunk(_batch(), None, MICROBATCH)[0].backward()
    assert order == ["head", "table 2", "head", "table 1", "head", "table 0"]


def test_tied_table_has_two_gradients_and_one_weight() -> None:
    chunk = _chunk(untie_embeddings_and_output_weights=False, hybrid_layer_pattern="M")
    names = [p.spec.name for p in chunk.model_parameters()]
    assert "output_layer.weight" not in names
    assert names.count("embedding.word_embeddings.weight") == 1
    grads = _grads(chunk)
    plain = _grads(_chunk(hybrid_layer_pattern="M", embedding_init_method_std=0.1))
    assert all(len(g) == (2 if name.startswith("embedding") else 1) for name, g in grads.items())
    # The output layer's gradient touches every row, the lookup's those of the tokens (the last one's label is masked).
    lookup, head = grads["embedding.word_embeddings.weight"]
    assert head.any(dim=1).all()
    assert lookup.any(dim=1).sum() == _batch().tokens_BS[:, :-1].unique().numel()
    assert plain["embedding.word_embeddings.weight"][0].any(dim=1).sum() == lookup.any(dim=1).sum()


def test_noise_differs_between_applications_of_one_block() -> None:
    chunk = _chunk(mtp_use_repeated_layer=True, hidden_dropout=0.5, hybrid_layer_pattern="M/-/-")
    x, ones = torch.randn(16, 1, 64), torch.ones(16, 1, 64)
    _, report = chunk(_batch(), None, MICROBATCH)
    first, second, again = (chunk.mtp(x, ones, d, MICROBATCH, report) for d in (1, 2, 1))
    assert same_bits(first.detach(), again.detach())
    assert not same_bits(first.detach(), second.detach())


def test_repeated_experts_report_and_weigh_the_mean_over_depths() -> None:
    changes = {"hybrid_layer_pattern": "M/E/E", "mtp_loss_scaling_factor": 0.0, "moe_aux_loss_coeff": (100.0,)}
    chunk = _chunk(mtp_use_repeated_layer=True, **changes)
    _, report = chunk(_batch(), None, MICROBATCH)
    (values,) = report.per_layer.values()
    assert list(values) == [1]
    apart = _chunk(**changes)
    _, report = apart(_batch(), None, MICROBATCH)
    (both,) = report.per_layer.values()
    assert list(both) == [1, 2]
    assert values[1].item() == pytest.approx(sum(v.item() for v in both.values()) / 2, rel=0.2)


def test_weight_of_a_mean_is_its_tokens_with_per_token_loss() -> None:
    batch = _batch()
    assert with_weight(MICROBATCH, batch, per_token=False).weight == 1.0
    assert with_weight(MICROBATCH, batch, per_token=True).weight.item() == batch.loss_mask_BS.sum().item()


def test_mean_over_no_token_is_zero() -> None:
    loss_sum, tokens = masked_sum(torch.ones(4, 1), torch.zeros(1, 4))
    assert tokens.item() == 0
    assert mean_of(loss_sum, tokens).item() == 0.0
