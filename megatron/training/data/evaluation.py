"""What an evaluation reads: so many batches from where the last one stopped, or the whole validation set once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.training.config.training import TrainingConfig
from megatron.training.data.batches import SampleSource


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalShape:
    """Sizes of an evaluation: ``batches`` global batches of ``batch_size`` samples; ``stride`` samples are one
    micro-batch of ``micro_batch_size`` of every logical shard."""

    batches: int
    batch_size: int
    stride: int
    micro_batch_size: int


def evaluates_after(training: TrainingConfig, iteration: int) -> bool:
    """Whether an evaluation follows an iteration of a run that has evaluations."""
    if iteration < (training.start_eval_at_iter or 0):
        return False
    return iteration == training.train_iters or iteration % training.eval_interval == 0


def plan_full_validation(samples: int, *, shards: int, at_most: int) -> EvalShape:
    """Batches of single samples that cover ``samples``, as equal as can be and not above ``at_most``, a multiple of the
    logical ``shards``. What they hold beyond ``samples`` is less than one sample a shard and batch."""
    batches = -(-samples // at_most)
    share = -(-samples // batches)
    return EvalShape(batches=batches, batch_size=-(-share // shards) * shards, stride=shards, micro_batch_size=1)


class WithoutLossBeyond:
    """A data set, and behind its end samples whose every position is without loss, up to ``total`` samples."""

    def __init__(self, dataset: SampleSource, total: int) -> None:
        self._dataset, self._total = dataset, total

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As the data set's; see ``GPTDataset``."""
        if index < len(self._dataset):
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
