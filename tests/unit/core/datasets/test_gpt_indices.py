"""Sample indices: published vectors, and the fast construction against a walk over the documents."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets import gpt_indices
from megatron.core.datasets.gpt_indices import build_indices, build_sample_index, plan_samples

LENGTHS = np.array([5, 3, 7, 4], np.int32)
EIGHT = ([2, 1, 2, 0, 0, 1, 3, 3], [(0, 0), (0, 4), (1, 1), (2, 2), (2, 6), (3, 3), (4, 2), (5, 1), (6, 2), (7, 2)])
# Equal to the output of Megatron-Core 0.16.1 for lengths 5, 3, 7, 4, sequences of 4 tokens and seed 1234.
VECTORS = [
    (3, 1, None, [0, 1, 2, 3], [(0, 0), (0, 4), (2, 0), (2, 4), (3, 1)], [1, 2, 3, 0]),
    (8, 2, None, *EIGHT, [6, 4, 0, 5, 3, 2, 8, 7, 1]),
    (
        10,
        3,
        9,
        [*EIGHT[0], 0, 2, 1, 3],
        [*EIGHT[1], (8, 2), (9, 1), (9, 5), (10, 2), (11, 3)],
        [7, 3, 5, 1, 4, 8, 0, 2, 6, 13, 10, 12, 9, 11],
    ),
]


@pytest.mark.parametrize(("asked", "epochs", "before_last", "documents", "rows", "order"), VECTORS)
def test_published_vectors(asked, epochs, before_last, documents, rows, order):
    plan = plan_samples(19, 4, asked)
    assert (plan.num_epochs, plan.samples_before_last_epoch) == (epochs, before_last)
    indices = build_indices(np.arange(4, dtype=np.int32), LENGTHS, plan, seed=1234)
    assert indices.document_index.tolist() == documents
    assert [tuple(row) for row in indices.sample_index.tolist()] == rows
    assert indices.shuffle_index.tolist() == order
    assert [a.dtype for a in indices.arrays().values()] == [np.int32, np.int32, np.uint32]


def _walk(documents, lengths, sequence_length, num_samples):
    """Token by token: the definition that the fast construction must equal."""
    line = [(p, o) for p, d in enumerate(documents) for o in range(lengths[d])]
    return [(0, 0)] + [line[k * sequence_length] for k in range(1, num_samples + 1)]


@pytest.mark.parametrize("rows_at_once", [None, 3])
def test_sample_index_equals_the_walk(rows_at_once: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpt_indices, "_ROW_BLOCK", rows_at_once or gpt_indices._ROW_BLOCK)
    generator = np.random.default_rng(0)
    tried = 0
    for _ in range(300):
        lengths = generator.integers(0, generator.choice([2, 9, 50]), generator.integers(1, 12)).astype(np.int32)
        s, asked = int(generator.integers(1, 20)), generator.choice([None, 1, 7, 30])
        if not lengths.sum():
            continue
        plan = plan_samples(int(lengths.sum()), s, asked)
        documents = np.tile(np.arange(len(lengths), dtype=np.int32), plan.num_epochs)
        generator.shuffle(documents)
        rows = build_sample_index(documents, lengths, plan)
        assert rows.dtype == np.int32
        assert [tuple(row) for row in rows.tolist()] == _walk(documents, lengths, s, plan.num_samples)
        assert plan.num_samples >= (asked or 0)
        tried += plan.num_samples > 1
    assert tried > 100


def test_plan_is_the_least_number_of_epochs():
    for tokens in (1, 2, 10, 19):
        for asked in (1, 5, 33):
            plan = plan_samples(tokens, 3, asked)
            assert plan.num_epochs * tokens >= asked * 3 + 1
            assert plan.num_epochs == 1 or (plan.num_epochs - 1) * tokens < asked * 3 + 1


def test_no_tokens_is_an_error_and_not_a_hang():
    with pytest.raises(ValueError, match="no tokens"):
        plan_samples(0, 4, 3)


@pytest.mark.parametrize(("tokens", "samples"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_epoch_drops_the_rest(tokens: int, samples: int):
    assert plan_samples(tokens, 4, None).num_samples == samples


def test_long_numbers_take_64_bits():
    plan = plan_samples(2**33, 2**31, None)
    lengths = np.full(8, 2**30, np.int32)
    rows = build_sample_index(np.arange(8, dtype=np.int32), lengths, plan)
    assert rows.tolist() == [[0, 0], [2, 0], [4, 0], [6, 0]]


def test_seed_and_request_decide_the_order():
    def order(seed, asked):
        plan = plan_samples(int(LENGTHS.sum()), 2, asked)
        return build_indices(np.arange(4, dtype=np.int32), LENGTHS, plan, seed).shuffle_index.tolist()

    assert order(1, 20) == order(1, 20)
    assert order(1, 20) != order(2, 20)
    assert order(1, 20) != order(1, 40)[: len(order(1, 20))]
