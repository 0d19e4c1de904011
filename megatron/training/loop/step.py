"""One optimizer step: forward and backward of all micro-batches, the watch over losses and norm, the update."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.contracts.batch import StageReport
from megatron.core.contracts.stage import Stage
from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.optimizer_param_scheduler import Schedule, learning_rate, weight_decay
from megatron.core.optimizer.replica_watch import stop_on_drift
from megatron.core.pipeline_parallel.execute import PipelineInput, run_pipeline
from megatron.core.process_groups.groups import ProcessGroups
from megatron.training.data.batches import BatchReader
from megatron.training.data.evaluation import EvalShape
from megatron.training.loop.replay import ReplayCheck
from megatron.training.loop.reports import ReportedLayers, StepLosses, start_losses
from megatron.training.observe.step_record import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Sizes of a step; ``shards`` are this rank's logical shards in pass order, ``stride`` the samples of one
    micro-batch of all logical shards, ``watch_replicas`` the iterations between comparisons of replicas. ``evaluation``
    has the sizes of an evaluation; ``overlap_p2p`` as ``PipelineInput.overlap``."""

    shards: tuple[int, ...]
    batch_sizes: BatchSizes
    stride: int
    micro_batch_size: int
    seq_length: int
    reported: ReportedLayers
    evaluation: EvalShape
    stop_on_non_finite: bool = True
    count_zeros: bool = False
    norm_params: bool = False
    per_token: bool = False
    watch_replicas: int | None = None
    overlap_p2p: bool = True


class TrainStep:
    """Everything a step needs; calling ``run`` is one step.

    The whole step is a function of the weights, the optimizer state, the iteration and the consumed samples; nothing
    else carries over from one step to the next.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        schedule: Schedule,
        groups: ProcessGroups,
        shape: StepShape,
    ) -> None:
        self.chunks, self.ddp, self.optimizer = chunks, ddp, optimizer
        self.schedule, self.groups, self.shape = schedule, groups, shape
        # Samples consumed before the schedule's first step: 0 unless a run went on without its optimizer state.
        self.schedule_start = 0
        self.replay: ReplayCheck | None = None

    def start_schedule(self, schedule: Schedule | None, start: int) -> None:
        """Use another schedule where one is given, and begin it after ``start`` consumed samples."""
        self.schedule = self.schedule if schedule is None else schedule
        self.schedule_start = start

    def run(self, reader: BatchReader, iteration: int, consumed_samples: int, *, digest: bool = False) -> StepMetrics:
        """Step ``iteration`` (1-based) on the samples from ``consumed_samples`` on; ``digest`` as in the optimizer's
        step.

        Raises:
            TrainingStoppedError: a loss or gradient is not finite; on every rank, before anything was updated. Or
                replicas have drifted apart, where they are watched, or the step computed twice gave two results, where
                that is checked.
        """
        start, shape = time.monotonic(), self.shape
        batch_size = shape.batch_sizes.at(consumed_samples)
        after = consumed_samples + batch_size
        if shape.watch_replicas and iteration % shape.watch_replicas == 0:
            # Before the update, which may give every rank new weights: what this step works with.
            stop_on_drift(self.optimizer, self.groups, iteration)
        reader.read_ahead(after, shape.batch_sizes.at(after) // shape.stride)
        compute = functools.partial(self._compute, reader, iteration, consumed_samples, batch_size)
        losses = compute() if self.replay is None else self.replay.run(compute, iteration)
        progress = consumed_samples - self.schedule_start
        lr, decay = learning_rate(self.schedule, progress), weight_decay(self.schedule, progress)
        outcome = self.optimizer.step(
            lr=lr, weight_decay=decay, iteration=iteration, count_zeros=shape.count_zeros, digest=digest
        )
        return StepMetrics(
            iteration=iteration,
            consumed_samples=after,
            global_batch_size=batch_size,
            num_tokens=losses.num_tokens,
            losses=losses.losses,
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros,
            params_norm=self.optimizer.params_norm() if shape.norm_params else None,
            learning_rate=lr,
            weight_decay=decay,
            elapsed_s=time.monotonic() - start,
        )

    def _compute(self, reader: BatchReader, iteration: int, consumed_samples: int, batch_size: int) -> StepLosses:
        """Losses and final gradients; of what the step starts from only router biases move."""
        self.ddp.zero_grad_buffer()
        losses = self._forward_backward(reader, iteration, consumed_samples, batch_size, training=True)
        # Read as late as possible, so that the device has something to do meanwhile.
        self.ddp.finalize_model_grads(losses().num_tokens if self.shape.per_token else None)
        return losses()

    def evaluate(self, reader: BatchReader, batches: int, iteration: int, consumed_samples: int) -> dict[str, float]:
        """Mean loss per token over ``batches`` global batches of an evaluation, from ``consumed_samples`` of the
        validation data on; nothing is updated and no noise is drawn.

        Raises:
            TrainingStoppedError: a loss is not finite; on every rank.
        """
        self.settle()
        total, tokens, batch_size = 0.0, 0, self.shape.evaluation.batch_size
        for number in range(batches):
            position = consumed_samples + number * batch_size
            losses = self._forward_backward(reader, iteration, position, batch_size, training=False)()
            total += losses.losses["lm loss"] * losses.num_tokens
            tokens += losses.num_tokens
        return {"lm loss": total / max(1, tokens)}

    def settle(self) -> None:
        """Wait for weights that a step has left in flight, before the run stops or the model is read."""
        self.ddp.finish_gather()

    def _forward_backward(
        self, reader: BatchReader, iteration: int, consumed_samples: int, batch_size: int, *, training: bool
    ) -> Callable[[], StepLosses]:
        shape = self.shape
        sizes = shape if training else shape.evaluation
        num_microbatches = batch_size // sizes.stride
        given = PipelineInput(
            iteration=iteration,
            shards=shape.shards,
            num_microbatches=num_microbatches,
            micro_batch_size=sizes.micro_batch_size,
            seq_length=shape.seq_length,
            batch=lambda shard, index: reader.read(consumed_samples, shard, index),
            begin_forward=self.ddp.begin_forward,
            begin_backward=self.ddp.begin_backward,
            end_pass=self.ddp.end_pass,
            training=training,
            overlap=shape.overlap_p2p,
        )
        by_place = run_pipeline(self.chunks, self.groups, given)
        reports: list[list[list[StageReport]]] = [
            [[by_place[chunk, shard, i] for i in range(num_microbatches)] for shard in shape.shards]
            for chunk in range(len(self.chunks))
        ]
        return start_losses(
            reports, shape.reported, self.groups, iteration, check=shape.stop_on_non_finite, training=training
        )
