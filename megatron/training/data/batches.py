"""Micro-batches of a step: read by logical coordinates, ahead of time if threads are given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import numpy as np
import torch

from megatron.core.contracts.batch import Batch
from megatron.core.datasets.sampler import Sampler


class SampleSource(Protocol):
    """A data set: sample number to arrays ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` of one length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


_Arrays: TypeAlias = tuple[dict[str, np.ndarray], torch.Tensor]


class BatchReader:
    """Reads this rank's logical shards of each step from a data set.

    Every rank reads for itself: the samples of (v, micro-batch) are a pure function of the consumed samples, so ranks
    that share a shard read the same ones and nothing is sent. With ``num_workers`` > 0 the next step is read while
    this one runs; what is read never depends on it.

    Args:
        dataset: the split.
        sampler: order of samples.
        shards: logical shards of this rank, in pass order.
        device: where the tensors go.
        num_workers: reading threads.
    """

    def __init__(
        self,
        dataset: SampleSource,
        sampler: Sampler,
        *,
        shards: Sequence[int],
        device: torch.device,
        num_workers: int,
    ) -> None:
        self._dataset, self._sampler, self._shards = dataset, sampler, tuple(shards)
        self._device = device
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="read") if num_workers else None
        self._ahead: dict[tuple[int, int, int], Future[_Arrays]] = {}
        self._digest = torch.zeros(2, dtype=torch.int64)
        self._current: dict[tuple[int, int, int], Batch] = {}

    def require(self, consumed: int, samples: int, what: str) -> None:
        """Refuse a data set, ``what`` in words, that ends before ``samples`` more samples.

        Raises:
            ConfigError: it does.
        """
        self._sampler.require(consumed, samples, what)

    def read(self, consumed: int, shard: int, index: int) -> Batch:
        """Micro-batch ``index`` of logical shard ``shard`` in the step that starts at ``consumed`` samples; the same
        tensors for every chunk that asks within one step.

        Raises:
            DamagedInputError: the data set holds ids outside the vocabulary there.
        """
        key = (consumed, shard, index)
        if key not in self._current:
            self._current = {k: batch for k, batch in self._current.items() if k[0] == consumed}
            self._current[key] = self._load(consumed, shard, index)
        return self._current[key]

    def _load(self, consumed: int, shard: int, index: int) -> Batch:
        future = self._ahead.pop((consumed, shard, index), None)
        arrays, digest = future.result() if future else self._arrays(consumed, shard, index)
        self._digest += digest
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._device.type == "cuda":
            tensors = {n: t.pin_memory().to(self._device, non_blocking=True) for n, t in tensors.items()}
        return Batch(
            tokens_BS=tensors["tokens"],
            labels_BS=tensors["labels"],
            loss_mask_BS=tensors["loss_mask"],
            position_ids_BS=tensors["position_ids"],
        )

    def read_ahead(self, consumed: int, num_microbatches: int) -> None:
        """Start reading the step of so many micro-batches that starts at ``consumed`` samples, if there are as many and
        threads for it."""
        needed = self._sampler.stride * num_microbatches
        if self._pool is None or self._sampler.problems(consumed, needed, "next"):
            return
        for shard in self._shards:
            for index in range(num_microbatches):
                key = (consumed, shard, index)
                if key not in self._ahead:
                    self._ahead[key] = self._pool.submit(self._arrays, *key)

    def take_digest(self) -> torch.Tensor:
        """int64 ``[2]``: digest of everything read since the last call; forgets it. The (wrapping) sum over the
        data-parallel ranks does not depend on how the logical shards are spread."""
        value, self._digest = self._digest, torch.zeros(2, dtype=torch.int64)
        return value

    def close(self) -> None:
        """Stop the reading threads."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _arrays(self, consumed: int, shard: int, index: int) -> _Arrays:
        """The micro-batch and its digest, which reading threads make too: for long sequences it takes milliseconds."""
        numbers = self._sampler.micro_batch(consumed, shard, index)
        samples = [self._dataset[int(n)] for n in numbers]
        arrays = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return arrays, _digest_of(shard, index, arrays)


def _digest_of(shard: int, index: int, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    total = hashlib.blake2b(f"{shard}:{index}".encode(), digest_size=16)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        total.update(arrays[name].data)
    return torch.from_numpy(np.frombuffer(total.digest(), dtype=np.int64).copy())
