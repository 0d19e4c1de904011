"""Batches that cover a data set once: all samples, no more padding than a sample a shard and batch."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.splits import requested_sizes
from megatron.training.data.evaluation import WithoutLossBeyond, plan_full_validation


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 100, 3073])
@pytest.mark.parametrize(("shards", "at_most"), [(1, 1), (1, 5), (2, 4), (4, 4), (8, 3072)])
def test_every_sample_once(samples: int, shards: int, at_most: int) -> None:
    shape = plan_full_validation(samples, shards=shards, at_most=at_most)
    padding = shape.batches * shape.batch_size - samples
    assert 0 <= padding < shape.batches * shards + shape.batches
    assert shape.batch_size % shards == 0
    assert shape.batch_size <= at_most
    assert (shape.stride, shape.micro_batch_size) == (shards, 1)


def test_what_is_beyond_the_end_has_no_loss() -> None:
    samples = [{"tokens": np.full(3, i), "loss_mask": np.ones(3, np.float32)} for i in range(2)]
    padded = WithoutLossBeyond(samples, 4)
    assert len(padded) == 4
    assert padded[1] is samples[1]
    assert padded[3]["loss_mask"].tolist() == [0, 0, 0]
    assert samples[0]["loss_mask"].tolist() == [1, 1, 1]


def test_samples_asked_for() -> None:
    asked = {"train_samples": 8, "train_iters": 4, "eval_iters": 3, "eval_interval": 2, "global_batch_size": 2}
    assert requested_sizes(**asked) == (8, 18, 6)
    assert requested_sizes(**asked, eval_global_batch_size=5) == (8, 45, 15)
    assert requested_sizes(**asked, full_validation=True) == (8, None, 6)
