"""The sampler: Megatron's order, the same global batches for any stop, resume and number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.sampler import Sampler


def _step(sampler: Sampler, consumed: int, micro_batches: int) -> list[list[list[int]]]:
    """Sample numbers as [micro-batch][logical rank][position]."""
    ranks = range(sampler.logical_data_parallel_size)
    return [[sampler.micro_batch(consumed, v, m).tolist() for v in ranks] for m in range(micro_batches)]


def _flat(step) -> list[int]:
    return [i for micro_batch in step for rank in micro_batch for i in rank]


def test_single_is_megatrons_order():
    sampler = Sampler(total_samples=1000, micro_batch_size=2, logical_data_parallel_size=4)
    for m in range(3):
        for v in range(4):
            first = 16 + m * 2 * 4 + v * 2
            assert sampler.micro_batch(16, v, m).tolist() == [first, first + 1]


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_single_reads_the_same_global_batches_for_any_cut(size: int, ranks: int):
    sampler = Sampler(total_samples=24, micro_batch_size=size, logical_data_parallel_size=ranks)
    micro_batches = 8 // sampler.stride
    for consumed in (0, 8, 16):
        assert _flat(_step(sampler, consumed, micro_batches)) == list(range(consumed, consumed + 8))


def test_single_stops_before_the_end_of_the_data():
    sampler = Sampler(total_samples=20, micro_batch_size=1, logical_data_parallel_size=8)
    assert sampler.problems(8, 8, "train") == []
    (problem,) = sampler.problems(16, 8, "train")
    assert str(problem).startswith("given 20 train samples; needed: 8 after the 16 consumed already")
    with pytest.raises(ConfigError):
        sampler.require(16, 8, "train")
    with pytest.raises(IndexError, match="of 20"):
        sampler.micro_batch(16, 0, 0)


def _megatron_cyclic(total: int, size: int, ranks: int, rank: int, sharding: bool, epoch: int) -> list[int]:
    """One epoch of one rank, written down from the description of Megatron's loader."""
    generator = torch.Generator().manual_seed(epoch)
    if sharding:
        bucket = total // (size * ranks) * size
        return [rank * bucket + int(i) for i in torch.randperm(bucket, generator=generator)]
    order = torch.randperm(total // size * size, generator=generator)
    return order[rank::ranks].tolist()


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize(("total", "size", "ranks"), [(20, 1, 4), (20, 2, 4), (21, 2, 1), (23, 3, 2)])
def test_cyclic_is_megatrons_order(total: int, size: int, ranks: int, sharding: bool):
    sampler = Sampler(
        total_samples=total,
        micro_batch_size=size,
        logical_data_parallel_size=ranks,
        loader="cyclic",
        data_sharding=sharding,
    )
    per_epoch = total // sampler.stride
    for epoch in range(3):
        for v in range(ranks):
            expected = _megatron_cyclic(total, size, ranks, v, sharding, epoch)[: per_epoch * size]
            start = epoch * per_epoch * sampler.stride
            got = [int(i) for m in range(per_epoch) for i in sampler.micro_batch(start, v, m)]
            assert got == expected


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_epochs_hold_each_sample_once_and_differ(sharding: bool):
    sampler = Sampler(
        total_samples=22, micro_batch_size=2, logical_data_parallel_size=2, loader="cyclic", data_sharding=sharding
    )
    epochs = [_flat(_step(sampler, e * 20, 5)) for e in range(2)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_a_stop_at_any_step_changes_nothing(loader: str):
    """Steps of 8 over 20 samples: the epoch's edge lies inside a step."""
    sampler = Sampler(
        total_samples=20 if loader == "cyclic" else 80, micro_batch_size=1, logical_data_parallel_size=4, loader=loader
    )
    straight = [_step(sampler, k * 8, 2) for k in range(8)]
    for stop in (2, 3, 5, 8):
        resumed = Sampler(
            total_samples=sampler.total_samples, micro_batch_size=1, logical_data_parallel_size=4, loader=loader
        )
        assert [_step(resumed, k * 8, 2) for k in range(stop, 8)] == straight[stop:]


def test_cyclic_moves_no_global_generator():
    before = torch.get_rng_state()
    Sampler(total_samples=31, micro_batch_size=1, logical_data_parallel_size=1, loader="cyclic").micro_batch(62, 0, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_cyclic_refuses_what_it_cannot_cut():
    sampler = Sampler(total_samples=7, micro_batch_size=2, logical_data_parallel_size=4, loader="cyclic")
    assert "at least micro-batch size" in str(sampler.problems(0, 8, "train")[0])
    sampler = Sampler(total_samples=70, micro_batch_size=2, logical_data_parallel_size=4, loader="cyclic")
    assert sampler.problems(16, 8, "train") == []
    assert "multiple of" in str(sampler.problems(12, 8, "train")[0])


def test_result_is_int64():
    sampler = Sampler(total_samples=8, micro_batch_size=2, logical_data_parallel_size=1)
    assert sampler.micro_batch(0, 0, 0).dtype == np.int64
