"""The model on several ranks against one rank: losses, balancing loss, counts and every gathered gradient, in fp32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.digest.bits import same_bits
from tests.support.ranks import run_ranks
from tests.support.tiny import Layout, Step, relative_error, tiny_gradients

TOLERANCE = 1e-5

DENSE = {"hybrid_layer_pattern": "M*-M"}
LEARNED = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": True,
    "squared_relu": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
BIASED = {**LEARNED, "add_bias_linear": True, "swiglu": False, "hybrid_layer_pattern": "M*-"}
SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": ("aux_loss",),
    "moe_input_jitter_eps": 0.1,
    "moe_router_dtype": None,
    "add_bias_linear": True,
    "moe_shared_expert_intermediate_size": None,
    "swiglu": False,
    "squared_relu": False,
}
GROUPS_SHARED = {"hybrid_layer_pattern": "**", "position_embedding_type": "rope", "rotary_percent": 0.5}

CASES = [
    (Layout(tp=2), 1, DENSE),
    (Layout(tp=2), 1, BIASED),
    (Layout(tp=2, sequence_parallel=True), 1, BIASED),
    (Layout(tp=2, sequence_parallel=True, etp=1), 1, {}),
    (Layout(tp=2, sequence_parallel=True, etp=1), 1, SOFTMAX),
    (Layout(tp=2, sequence_parallel=True, etp=2), 1, LEARNED),
    (Layout(tp=2, sequence_parallel=True, ep=2, etp=1), 1, {}),
    (Layout(dp=2, ep=2), 2, {}),
    (Layout(dp=2, ep=2), 2, SOFTMAX),
    (Layout(dp=4, ep=4), 4, {}),
    (Layout(tp=2, dp=2, sequence_parallel=True, ep=2, etp=1), 2, {}),
    (Layout(tp=2, dp=2, sequence_parallel=True, ep=2, etp=2), 2, {}),
    (Layout(tp=4), 1, GROUPS_SHARED),
    (Layout(tp=4, sequence_parallel=True), 1, GROUPS_SHARED),
]


@functools.cache
def _one_rank(changes: tuple[tuple[str, Any], ...], shards: int, size: int) -> Step:
    return tiny_gradients(Layout(), shards, dict(changes), 2, size)


def _compare(layout: Layout, shards: int, changes: dict[str, Any], size: int) -> list[Step]:
    want = _one_rank(tuple(changes.items()), shards, size)
    steps = run_ranks(layout.world, tiny_gradients, layout, shards, changes, 2, size)
    for step in steps:
        for place, (loss, tokens) in step.losses.items():
            assert tokens == want.losses[place][1]
            assert loss == pytest.approx(want.losses[place][0], rel=TOLERANCE)
        for place, layers in step.aux.items():
            assert layers == pytest.approx(want.aux[place], rel=TOLERANCE)
        assert step.grads.keys() == want.grads.keys()
        errors = {name: relative_error(step.grads[name], grad) for name, grad in want.grads.items()}
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        assert not wrong
    for name, counts in want.token_counts.items():
        per_rank = torch.tensor([step.token_counts[name] for step in steps])
        copies = 1 if layout.sequence_parallel else layout.tp
        assert (per_rank.sum(0) // copies).tolist() == counts
    return steps


@pytest.mark.parametrize(("layout", "shards", "changes"), CASES, ids=lambda v: str(v) if isinstance(v, Layout) else "")
def test_layout_agrees_with_one_rank(layout: Layout, shards: int, changes: dict[str, Any]) -> None:
    steps = _compare(layout, shards, changes, size=2)
    # Copies of one parameter on tensor-parallel ranks: equal bits where the gradient is complete on each.
    if not layout.sequence_parallel:
        first, *others = (steps[r].own_grads for r in range(layout.tp))
        for name, grad in first.items():
            assert all(same_bits(other[name], grad) for other in others), name


def test_losses_and_reports_are_equal_on_all_tensor_parallel_ranks() -> None:
    layout = Layout(tp=2, sequence_parallel=True, etp=1)
    steps = run_ranks(2, tiny_gradients, layout, 1, {}, 1)
    assert steps[0].losses == steps[1].losses
    assert steps[0].aux == steps[1].aux


def test_partial_gradients_differ_before_their_sum() -> None:
    """Control: without the sum over tensor-parallel ranks the copies under sequence parallelism are not equal."""
    steps = run_ranks(2, tiny_gradients, Layout(tp=2, sequence_parallel=True, etp=1), 1, {}, 1)
    name = "decoder.layers.1.mlp.router.weight"
    assert not same_bits(steps[0].own_grads[name], steps[1].own_grads[name])
    assert relative_error(steps[0].own_grads[name], steps[0].grads[name]) > 1e-2


def test_a_step_repeats_bit_for_bit() -> None:
    layout = Layout(tp=2, dp=2, sequence_parallel=True, ep=2, etp=1)
    changes = {**LEARNED, "moe_input_jitter_eps": 0.1}
    first, second = (run_ranks(4, tiny_gradients, layout, 2, changes, 2) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.losses == b.losses
        assert a.aux == b.aux
        assert all(same_bits(a.grads[name], b.grads[name]) for name in a.grads)
