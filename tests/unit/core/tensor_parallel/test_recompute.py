"""Activations computed a second time: the same bits, counts and reports, and less that is kept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.contracts.batch import Microbatch
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_block import recomputed_layers
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from megatron.core.tensor_parallel.recompute import compute_again, keeping
from tests.support.ranks import groups_for_test
from tests.support.tiny import VOCAB_SIZE, Layout, Step, tiny_batch, tiny_config, tiny_context, tiny_gradients

MODEL = {
    "hybrid_layer_pattern": "ME*-/*E/*E",
    "seq_length": 32,
    "mtp_use_repeated_layer": True,
    "qk_layernorm": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "moe_input_jitter_eps": 0.1,
    "moe_latent_size": 32,
    "moe_shared_expert_gate": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (1e-2, 1e-2),
    "moe_z_loss_coeff": 1e-3,
}
FULL = {"recompute_granularity": "full"}
WAYS: list[dict[str, Any]] = [
    {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
    {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    *({"recompute_granularity": "selective", "recompute_modules": (name,)}
      for name in ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")),
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "moe", "moe_act")},
]  # fmt: skip


@functools.cache
def _plain() -> Step:
    return tiny_gradients(Layout(), 1, MODEL, 2)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(v) for v in way.values()))
def test_no_bit_changes(way: dict[str, Any]) -> None:
    got = tiny_gradients(Layout(), 1, {**MODEL, **way}, 2)
    assert (got.losses, got.aux, got.token_counts) == (_plain().losses, _plain().aux, _plain().token_counts)
    assert got.grads.keys() == _plain().grads.keys()
    assert all(same_bits(got.grads[name], grad) for name, grad in _plain().grads.items())


def _kept_bytes(changes: dict[str, Any]) -> int:
    """Bytes of the storages that a forward pass keeps."""
    config = tiny_config(**{"hybrid_layer_pattern": "ME*-", "seq_length": 32, **changes})
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups_for_test()), VOCAB_SIZE)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk(tiny_batch(0, 0, seq_length=32), None, Microbatch(iteration=1, shard=0, index=0, num_microbatches=1))
    return sum(storages.values())


@pytest.mark.parametrize("way", WAYS[:8], ids=lambda way: "-".join(str(v) for v in way.values()))
def test_less_is_kept(way: dict[str, Any]) -> None:
    # What ``keeping`` replaces never reaches the outer hook, so the count sees it too.
    assert _kept_bytes(way) < _kept_bytes({})


def _calls(chunk: HybridChunk, monkeypatch: pytest.MonkeyPatch, training: bool = True) -> int:
    (attention,) = (layer.self_attention for layer in chunk.decoder.layers.values() if hasattr(layer, "self_attention"))
    calls, op = [], attention._attention
    monkeypatch.setattr(attention, "_attention", lambda *args: calls.append(1) or op(*args))
    place = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1, training=training)
    with torch.set_grad_enabled(training):
        loss, _ = chunk(tiny_batch(0, 0, seq_length=32), None, place)
    if training:
        loss.backward()
    return len(calls)


@pytest.mark.parametrize(("way", "calls"), [({}, 1), (WAYS[0], 2), (WAYS[2], 1), (WAYS[3], 2), (WAYS[5], 1)])
def test_only_what_was_asked_for_runs_twice(way: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hybrid_layer_pattern="-M*", seq_length=32, **way)
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups_for_test()), VOCAB_SIZE)
    assert _calls(chunk, monkeypatch) == calls
    monkeypatch.undo()
    assert _calls(chunk, monkeypatch, training=False) == 1


def test_layers_that_are_computed_again() -> None:
    def plan(count: int, **way: Any) -> list[tuple[int, int]]:
        return recomputed_layers(tiny_config(**way), count)

    assert plan(5) == plan(5, recompute_granularity="selective") == []
    assert plan(5, **FULL, recompute_method="uniform", recompute_num_layers=2) == [(0, 2), (2, 4), (4, 5)]
    assert plan(5, **FULL, recompute_method="block", recompute_num_layers=2) == [(0, 1), (1, 2)]
    assert plan(1, **FULL, recompute_method="block", recompute_num_layers=2) == [(0, 1)]
    assert plan(0, **FULL, recompute_method="uniform", recompute_num_layers=1) == []


def test_value_is_produced_again_only_where_it_is_used() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    made = []

    def produce() -> torch.Tensor:
        made.append(1)
        return x.detach() * 2.0

    value = x * 2.0
    with keeping(produce, value):
        out = value @ w
    assert not made
    out.sum().backward()
    assert len(made) == 1
    got = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    (x * 2.0 @ w).sum().backward()
    assert same_bits(got[0], x.grad)
    assert same_bits(got[1], w.grad)


def test_gradients_of_all_inputs_come_back() -> None:
    q, k = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    compute_again(lambda q, k: q * k, q, k).sum().backward()
    assert same_bits(q.grad, k.detach())
    assert same_bits(k.grad, q.detach())
