"""Linear layers, embedding and parameters on one rank: values, and where gradients go."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.contracts.param_spec import Initial
from megatron.core.digest.bits import same_bits
from megatron.core.rng.initial_values import draw_parameter
from megatron.core.tensor_parallel.column import ColumnParallelLinear
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.linear import add_bias, add_weight_grad, linear
from megatron.core.tensor_parallel.norm import NormColumnParallelLinear
from megatron.core.tensor_parallel.parameter import create_parameter, cut_spec, replicated_spec
from megatron.core.tensor_parallel.row import RowParallelLinear
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context


@pytest.fixture
def context() -> ModelContext:
    return tiny_context(groups_for_test())


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_linear_is_the_product(kind: type, context: ModelContext) -> None:
    layer = kind("layer", 24, 40, context, init_std=0.5, bias=True)
    x = torch.randn(6, 2, 24, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    twin = x.detach().requires_grad_()
    weight, bias = (p.detach().requires_grad_() for p in (layer.weight, layer.bias))
    want = twin @ weight.t() + bias
    want.backward(dy)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    torch.testing.assert_close(layer.bias.grad, bias.grad)


def test_gradients_go_into_the_main_gradient_and_add_up(context: ModelContext) -> None:
    layer = ColumnParallelLinear("layer", 24, 40, context, init_std=0.5)
    x = torch.randn(6, 2, 24)
    layer(x).sum().backward()
    alone = layer.weight.grad.clone()
    layer.weight.grad = None
    layer.weight.main_grads = (torch.full((40, 24), 3.0),)
    for _ in range(2):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grads[0], 3.0 + 2 * alone)


def test_bfloat16_gradients_are_kept_in_fp32() -> None:
    context = tiny_context(groups_for_test(), dtype=torch.bfloat16)
    layer = NormColumnParallelLinear("layer", 64, 40, tiny_config(), context, bias=True)
    for param in layer.parameters():
        param.main_grads = (torch.zeros(param.shape),)
    x = torch.randn(6, 2, 64).bfloat16()
    (layer(x).float() * 1.0009765625).sum().backward()
    rounded = [same_bits(p.main_grads[0].bfloat16().float(), p.main_grads[0]) for p in layer.parameters()]
    assert not any(rounded[i] for i, (name, _) in enumerate(layer.named_parameters()) if name != "bias")


def test_a_frozen_weight_gets_no_gradient(context: ModelContext) -> None:
    layer = ColumnParallelLinear("layer", 8, 4, context, init_std=0.5)
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 1, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_embedding_looks_rows_up(context: ModelContext) -> None:
    table = VocabParallelEmbedding("table", 16, context, init_std=1.0)
    tokens = torch.tensor([[3, 5, 3], [0, 511, 3]])
    out = table(tokens)
    assert same_bits(out.detach(), table.weight.detach()[tokens.t()])
    out.sum().backward()
    assert table.weight.grad.sum(dim=1).nonzero().flatten().tolist() == [0, 3, 5, 511]
    assert table.weight.grad[3].tolist() == [3.0] * 16


def test_values_come_from_names_and_global_indices(context: ModelContext) -> None:
    normal = Initial(kind="normal", a=0.02)
    first = create_parameter(cut_spec("a.weight", (8, 4), 0, normal, context), context)
    again = create_parameter(replicated_spec("a.weight", (8, 4), normal, context), context)
    other = create_parameter(cut_spec("b.weight", (8, 4), 0, normal, context), context)
    assert same_bits(first.detach(), again.detach())
    assert not same_bits(first.detach(), other.detach())


def test_drawing_refuses_another_shape(context: ModelContext) -> None:
    spec = cut_spec("a.weight", (8, 4), 0, Initial(kind="normal", a=0.02), context)
    with pytest.raises(ValueError, match=r"a\.weight"):
        draw_parameter(spec, 1, torch.empty(4, 8))


def test_weight_gradient_is_handed_on_only_while_nobody_owns_the_parameter(context: ModelContext) -> None:
    weight = create_parameter(cut_spec("w", (4, 8), 0, Initial(kind="normal", a=1.0), context), context)
    grad = add_weight_grad(weight, lambda buffer: buffer.add_(2.0))
    assert grad.tolist() == [[2.0] * 8] * 4
    weight.main_grads = (torch.ones(4, 8),)
    assert add_weight_grad(weight, lambda buffer: buffer.add_(2.0)) is None
    assert weight.main_grads[0].tolist() == [[3.0] * 8] * 4


def test_both_ends_of_a_pipeline_add_into_their_own_buffer(context: ModelContext) -> None:
    spec = cut_spec("w", (4, 8), 0, Initial(kind="normal", a=1.0), context)
    weight = create_parameter(dataclasses.replace(spec, stages=("first", "last")), context)
    weight.main_grads = (torch.zeros(4, 8), torch.zeros(4, 8))
    linear(torch.ones(3, 1, 8), weight, context, stage="last").sum().backward()
    assert not weight.main_grads[0].any()
    assert weight.main_grads[1].tolist() == [[3.0] * 8] * 4


def test_bias_is_added_in_fp32() -> None:
    context = tiny_context(groups_for_test(), dtype=torch.bfloat16)
    bias = create_parameter(cut_spec("b", (1,), 0, Initial(kind="constant", a=1.0), context), context)
    bias.main_grads = (torch.zeros(1),)
    y = torch.full((300, 1), 2.0**-9, dtype=torch.bfloat16)
    add_bias(y, bias).sum().backward()
    assert bias.main_grads[0].item() == 300.0
    assert add_bias(y, None) is y
