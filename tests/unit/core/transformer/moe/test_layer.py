"""The MoE layer on one rank against a loop over tokens and experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear, relu, silu

from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.digest.bits import same_bits
from megatron.core.ops.grouped_gemm.spec import ends_of
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExperts
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

CPU = torch.device("cpu")
MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)
PADDED = {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True}
BIASED = {"add_bias_linear": True, "squared_relu": False, "moe_shared_expert_intermediate_size": None}


def _layer(**changes: Any) -> MoELayer:
    layer = MoELayer("mlp", 0, tiny_config(**changes), tiny_context(groups_for_test()))
    for name, param in layer.named_parameters():
        if name.endswith("bias"):
            param.data.normal_()
    return layer


def _loop(layer: MoELayer, x: torch.Tensor, activation: Any) -> torch.Tensor:
    routing = layer.router(x, MICROBATCH, StageReport())
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    out = []
    rows = x.flatten(0, 1)
    if layer.fc1_latent_proj is not None:
        rows = linear(rows, layer.fc1_latent_proj.weight)
    kept = torch.ones_like(routing.ids_Tk) if routing.kept_Tk is None else routing.kept_Tk
    for token, ids, weights, takes in zip(rows, routing.ids_Tk.tolist(), routing.weight_Tk, kept, strict=True):
        total = torch.zeros_like(token)
        for e, weight, takes_it in zip(ids, weights, takes.tolist(), strict=True):
            if not takes_it:
                continue
            inner = linear(token, fc1.weight[e], None if fc1.bias is None else fc1.bias[e])
            total = total + weight * linear(activation(inner), fc2.weight[e], None if fc2.bias is None else fc2.bias[e])
        out.append(total)
    together = torch.stack(out)
    if layer.fc2_latent_proj is not None:
        together = linear(together, layer.fc2_latent_proj.weight)
    whole = together.view_as(x)
    shared = layer.shared_experts
    if shared is not None:
        more = linear(activation(linear(x, shared.linear_fc1.weight)), shared.linear_fc2.weight)
        whole = whole + (more if shared.gate_weight is None else more * linear(x, shared.gate_weight).sigmoid())
    return whole


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, lambda x: relu(x).square()),
        ({"squared_relu": False, "swiglu": True}, _swiglu),
        (BIASED, lambda x: gelu(x, approximate="tanh")),
        ({"moe_router_topk": 1, "num_moe_experts": 8}, lambda x: relu(x).square()),
        ({"moe_latent_size": 24, "moe_shared_expert_gate": True}, lambda x: relu(x).square()),
        ({"moe_expert_capacity_factor": 0.7}, lambda x: relu(x).square()),
        ({"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"}, lambda x: relu(x).square()),
        (PADDED, lambda x: relu(x).square()),
        ({**PADDED, **BIASED}, lambda x: gelu(x, approximate="tanh")),
        ({**PADDED, "moe_expert_capacity_factor": 1.5, "moe_router_topk": 1}, lambda x: relu(x).square()),
    ],
)
def test_agrees_with_a_loop_over_tokens(changes: dict[str, Any], activation: Any) -> None:
    layer = _layer(moe_aux_loss_coeff=(0.0,), **changes)
    x = torch.randn(11, 2, 64)
    got = layer(x, MICROBATCH, StageReport())
    want = _loop(layer, x, activation)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(x)
    grads = []
    for out in (got, want):
        layer.zero_grad()
        out.backward(dy)
        grads.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-4)


def test_idle_experts_get_exactly_zero() -> None:
    layer = _layer(**BIASED)
    layer.router.expert_bias_E.copy_(torch.tensor([0.0, 0.0, -1e9, -1e9]))
    layer(torch.randn(9, 1, 64), MICROBATCH, StageReport()).sum().backward()
    for param in layer.experts.parameters():
        assert not param.grad[2:].any()
        assert all(param.grad[e].any() for e in range(2))


def test_rows_of_other_experts_do_not_change_an_expert() -> None:
    experts = GroupedMLP("experts", tiny_config(), tiny_context(groups_for_test()))
    rows, weights = torch.randn(12, 64), torch.rand(12)
    alone = experts(rows[:5], weights[:5], ends_of((5, 0, 0, 0), CPU))
    together = experts(rows, weights, ends_of((5, 0, 4, 3), CPU))
    assert same_bits(alone.detach(), together[:5].detach())


def test_no_rows_at_all() -> None:
    experts = GroupedMLP("experts", tiny_config(), tiny_context(groups_for_test()))
    rows = torch.zeros(0, 64, requires_grad=True)
    experts(rows, torch.zeros(0), ends_of((0, 0, 0, 0), CPU)).sum().backward()
    assert rows.grad.shape == (0, 64)
    assert all(not param.grad.any() for param in experts.parameters())


def test_parameters_are_stacked_under_one_name() -> None:
    spec = GroupedMLP("mlp.experts", tiny_config(), tiny_context(groups_for_test())).linear_fc1.weight.spec
    assert spec.name == "mlp.experts.linear_fc1.weight"
    assert spec.shape == (4, 64, 64)
    assert [shard.index for shard in spec.shards] == [0, 1, 2, 3]
    assert spec.expert


def test_shared_experts_have_neither_norm_nor_bias() -> None:
    shared = SharedExperts("shared", tiny_config(add_bias_linear=True), tiny_context(groups_for_test()))
    shapes = {name: tuple(p.shape) for name, p in shared.named_parameters()}
    assert shapes == {"linear_fc1.weight": (128, 64), "linear_fc2.weight": (64, 128)}


def test_biases_under_expert_tensor_parallelism_are_refused() -> None:
    groups = groups_for_test()
    pair = dataclasses.replace(groups.etp, ranks=(0, 1))
    with pytest.raises(ValueError, match="expert-tensor-parallel size of 1"):
        MoELayer("mlp", 0, tiny_config(**BIASED), tiny_context(dataclasses.replace(groups, etp=pair)))


def test_tensor_parallelism_without_sequence_parallelism_is_refused() -> None:
    groups = groups_for_test()
    pair = dataclasses.replace(groups.tp, ranks=(0, 1))
    with pytest.raises(ValueError, match="sequence parallelism"):
        MoELayer("mlp", 0, tiny_config(), tiny_context(dataclasses.replace(groups, tp=pair)))


def test_a_choice_over_capacity_is_dropped_whole() -> None:
    layer = _layer(moe_expert_capacity_factor=0.5, moe_aux_loss_coeff=(0.0,), moe_shared_expert_intermediate_size=None)
    routing = layer.router(x := torch.randn(40, 1, 64), MICROBATCH, StageReport())
    nowhere = ~routing.kept_Tk.any(dim=1)
    assert nowhere.any()
    assert routing.rows_E.max() == 10
    out = layer(x, MICROBATCH, StageReport()).detach().squeeze(1)
    assert not out[nowhere].any()
    assert out[~nowhere].any(dim=1).all()


def test_padding_gives_every_expert_the_same_number_of_rows() -> None:
    layer = _layer(**PADDED)
    x = torch.randn(40, 1, 64)
    plan = layer._dispatcher.start_plan(layer.router(x, MICROBATCH, StageReport()))()
    assert plan.ends_E.tolist() == [14, 28, 42, 56]
    plain = _layer(moe_expert_capacity_factor=0.7)
    torch.testing.assert_close(layer(x, MICROBATCH, StageReport()), plain(x, MICROBATCH, StageReport()))


def test_latent_width_reaches_experts_and_names() -> None:
    shapes = {
        name: tuple(p.shape) for name, p in _layer(moe_latent_size=24, moe_shared_expert_gate=True).named_parameters()
    }
    assert shapes["experts.linear_fc1.weight"] == (4, 64, 24)
    assert shapes["experts.linear_fc2.weight"] == (4, 24, 64)
    assert shapes["fc1_latent_proj.weight"] == (24, 64)
    assert shapes["fc2_latent_proj.weight"] == (64, 24)
    assert shapes["shared_experts.linear_fc1.weight"] == (128, 64)
    assert shapes["shared_experts.gate_weight"] == (1, 64)
