"""Blends: sizes, spelling, samples, and draws beyond a member."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blend_indices import build_blend_indices
from megatron.core.datasets.blended import BlendedDataset, blend_size, member_request, parse_blend
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleRules
from megatron.core.datasets.gpt_indices import build_indices, plan_samples
from megatron.core.datasets.index_cache import digested
from megatron.core.datasets.mock import MockDocuments


def test_requests_are_rounded_up_twice():
    assert member_request(10, 0.3) == 3
    assert member_request(10, 0.25, 0.005) == 4
    assert member_request(1000, 0.3, 0.005) == 302
    assert blend_size(10, (0.33, 0.67)) == 4 + 7
    assert member_request(0, 0.3, 0.005) == 0


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (("a",), ("a",), None),
        (("a", "b"), ("a", "b"), None),
        (("0.3", "a", "7", "b"), ("a", "b"), (0.3, 7.0)),
        (("1", "a"), ("a",), (1.0,)),
        (("./1", "a", "./2"), ("./1", "a", "./2"), None),
    ],
)
def test_spelling(words, prefixes, weights):
    blend = parse_blend(words, "--data-path")
    assert (blend.prefixes, blend.weights) == (prefixes, weights)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("1", "a", "x", "b"), "'x' is a prefix with no weight before it"),
        (("0.7", "a", "0.3"), "'0.3' is a weight with no prefix behind it"),
        (("0.7", "a", "b"), "'b' is a prefix with no weight before it"),
        (("a", "0.7", "b"), "'a' is a prefix with no weight before it"),
        (("1",), "'1' is a weight with no prefix behind it"),
    ],
)
def test_the_word_out_of_place_is_named(words, wrong):
    with pytest.raises(ConfigError) as caught:
        parse_blend(words, "--train-data-path")
    (problem,) = caught.value.problems
    assert problem.given == f"--train-data-path {' '.join(words)}"
    assert problem.needed == f"a weight before every prefix, or before none; {wrong}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("1e400", "a", "1", "b"), "1e400 is inf"),
        (("-1", "a", "2", "b"), "-1 is -1.0"),
        (("1", "a", "nan", "b"), "nan is nan"),
        (("1", "a", "0", "b"), "0 is 0.0"),
        (("1e308", "a", "1e308", "b"), "their sum is inf"),
    ],
)
def test_a_wrong_weight_is_named_with_its_reason(words, reason):
    with pytest.raises(ConfigError) as caught:
        parse_blend(words, "--data-path")
    (problem,) = caught.value.problems
    assert problem.given == f"--data-path {' '.join(words)}"
    assert problem.needed == f"finite weights above 0 with a finite sum; {reason}"


def _member(num_documents: int) -> GPTDataset:
    source = MockDocuments(100, 99)
    plan = plan_samples(int(source.sequence_lengths[:num_documents].sum()), 64, None)
    indices = build_indices(np.arange(num_documents, dtype=np.int32), source.sequence_lengths, plan, seed=1)
    return GPTDataset(
        source, digested(indices.arrays()), SampleRules(sequence_length=64, vocab_size=100, eod=99, pad=-1)
    )


def test_samples_come_from_the_member_drawn():
    members = [_member(2), _member(5)]
    blend = BlendedDataset(members, digested(build_blend_indices((0.5, 0.5), 8)))
    assert len(blend) == 8
    for i in range(8):
        member, local = members[blend.dataset_index[i]], int(blend.dataset_sample_index[i])
        assert np.array_equal(blend.raw(i), member.raw(local))
        assert np.array_equal(blend[i]["labels"], member[local]["labels"])
    for i in (-1, 8):
        with pytest.raises(IndexError):
            blend[i]


def test_drawing_beyond_a_member_is_refused():
    members = [_member(1), _member(5)]
    size = 2 * len(members[0])
    BlendedDataset(members, digested(build_blend_indices((0.5, 0.5), size)))
    with pytest.raises(ConfigError, match="--mid-level-dataset-surplus"):
        BlendedDataset(members, digested(build_blend_indices((0.5, 0.5), size + 2)))
