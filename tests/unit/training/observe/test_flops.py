"""Operations of a sample: only the kinds of layers that a model has are asked about."""

from __future__ import annotations

import pytest

from megatron.training.config.resolve import pattern_of, resolve
from megatron.training.observe.flops import flops_per_sample
from tests.support.settings import given


def flops(*words: str) -> float:
    """Of a model of hidden size 8 and 4 tokens, with a vocabulary of 16."""
    model = resolve(given("--hidden-size", "8", "--seq-length", "4", *words), 1).model
    pattern = pattern_of(model)
    return flops_per_sample(model, {symbol: pattern.count(symbol) for symbol in "M*-E"}, 16)


HEAD = 3 * 2 * 4 * 8 * 16


def test_layers_that_a_model_lacks_need_no_settings() -> None:
    assert flops("--hybrid-layer-pattern", "-", "--ffn-hidden-size", "10") == HEAD + 3 * 4 * 4 * 8 * 10
    assert flops("--hybrid-layer-pattern", "--", "--ffn-hidden-size", "10") == HEAD + 2 * 3 * 4 * 4 * 8 * 10


def test_parts_that_predict_further_count_their_layers_and_a_head() -> None:
    assert flops("--hybrid-layer-pattern", "/-/-", "--ffn-hidden-size", "10") == 3 * HEAD + 2 * 3 * 4 * 4 * 8 * 10


def test_attention_counts_its_projections_and_the_causal_half_of_the_scores() -> None:
    words = ("--hybrid-layer-pattern", "*", "--num-attention-heads", "2", "--kv-channels", "4")
    # Query, key, value and output are 8 by 8 each; scores and weighted values over all pairs would be twice as many.
    assert flops(*words) == pytest.approx(HEAD + 3 * (4 * 2 * 4 * 8 * 8 + 2 * 4 * 4 * 8))
