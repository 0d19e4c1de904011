"""The stack of one chunk: residual additions, final norm, users' own layers."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_block import HybridBlock
from megatron.core.models.hybrid.hybrid_layer_allocation import assign_segments, parse_pattern
from megatron.core.models.hybrid.hybrid_layer_specs import LayerSpec, hybrid_stack_spec
from megatron.core.tensor_parallel.context import ModelContext
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)


class Doubling(torch.nn.Module):
    """A layer of a user's own."""

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        self.name, self.layer = name, layer

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        return x_SBH


def _blocks(pattern: str, spec: Any = hybrid_stack_spec, pp: int = 1, **changes: Any) -> list[HybridBlock]:
    config = tiny_config(hybrid_layer_pattern=pattern, **changes)
    segments = assign_segments(parse_pattern(pattern), pp)
    return [HybridBlock(s, config, tiny_context(groups_for_test()), spec) for s in segments]


def test_layers_add_to_the_residual() -> None:
    first, last = _blocks("MM|M", {"M": LayerSpec(slot="mixer", build=Doubling)})
    x = torch.randn(4, 1, 64)
    assert same_bits(first(x, MICROBATCH, StageReport()), 4 * x)
    want = last.final_norm(2 * x)
    assert same_bits(last(x, MICROBATCH, StageReport()).detach(), want.detach())
    doubling = last.get_submodule("layers.2.mixer")
    assert (doubling.name, doubling.layer) == ("decoder.layers.2.mixer", 2)


def test_pre_norm_is_applied_where_the_spec_says() -> None:
    spec = {"M": LayerSpec(slot="mixer", build=Doubling, pre_norm="input_norm")}
    first, _ = _blocks("M|M", spec)
    x = torch.randn(4, 1, 64)
    want = x + first.get_submodule("layers.0.input_norm")(x)
    assert same_bits(first(x, MICROBATCH, StageReport()).detach(), want.detach())
    assert [p.spec.name for p in first.parameters()] == ["decoder.layers.0.input_norm.weight"]


def test_every_symbol_has_a_layer() -> None:
    (block,) = _blocks("M*-E")
    kinds = [type(layer.get_submodule(layer._slot)).__name__ for layer in block.layers.values()]
    assert kinds == ["MambaMixer", "SelfAttention", "MLP", "MoELayer"]
    assert len(hybrid_stack_spec) == 4


def test_dropout_sits_before_the_addition() -> None:
    first, _ = _blocks("M|M", {"M": LayerSpec(slot="mixer", build=Doubling)}, hidden_dropout=0.5)
    out = first(torch.ones(64, 2, 64), MICROBATCH, StageReport())
    assert sorted(out.unique().tolist()) == [1.0, 3.0]
