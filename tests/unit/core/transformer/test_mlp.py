"""MLP and norms against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)
GELU = {"squared_relu": False, "add_bias_linear": True}


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, lambda x: functional.relu(x).square()),
        ({"squared_relu": False, "swiglu": True}, _swiglu),
        (GELU, lambda x: functional.gelu(x, approximate="tanh")),
        ({**GELU, "bias_gelu_fusion": False}, functional.gelu),
        ({"squared_relu": False}, functional.gelu),
    ],
)
def test_activations(changes: dict[str, Any], activation: Any) -> None:
    config = tiny_config(**changes)
    layer = MLP("mlp", 96, config, tiny_context(groups_for_test()))
    for param in layer.parameters():
        param.data.normal_(0.0, 0.2)
    x = torch.randn(10, 2, 64)
    normed = functional.rms_norm(x, (64,), layer.linear_fc1.layer_norm_weight, 1e-5)
    inner = activation(functional.linear(normed, layer.linear_fc1.weight, layer.linear_fc1.bias))
    want = functional.linear(inner, layer.linear_fc2.weight, layer.linear_fc2.bias)
    torch.testing.assert_close(layer(x, MICROBATCH, StageReport()), want, rtol=1e-5, atol=1e-5)
    assert (layer.linear_fc1.bias is not None) == bool(config.add_bias_linear)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms(kind: str) -> None:
    norm = Norm("norm", tiny_config(normalization=kind), tiny_context(groups_for_test()))
    assert {name for name, _ in norm.named_parameters()} == {"weight"} | ({"bias"} if kind == "LayerNorm" else set())
    for param in norm.parameters():
        param.data.normal_()
    x = torch.randn(5, 2, 64)
    want = (
        functional.rms_norm(x, (64,), norm.weight, 1e-5)
        if kind == "RMSNorm"
        else functional.layer_norm(x, (64,), norm.weight, norm.bias, 1e-5)
    )
    torch.testing.assert_close(norm(x), want, rtol=1e-5, atol=1e-5)
