"""run_pipeline: walk one rank's part of a pipeline plan; the only loop over micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.contracts.stage import Stage
from megatron.core.pipeline_parallel.plan import Compute, Tick, Transfer, plan_pipeline
from megatron.core.process_groups.collectives import Waiting, start_exchange
from megatron.core.process_groups.groups import ProcessGroups

Reports = dict[tuple[int, int, int], StageReport]
"""By (chunk of this rank, logical shard, micro-batch index in the shard)."""


def _nothing(*_: object) -> None:
    """The callback that does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineInput:
    """What all chunks of all ranks work on.

    ``shards`` are this rank's logical shards in pass order, ``num_microbatches`` counts those of each.
    ``batch(v, i)`` is micro-batch i of logical shard v; it is called once per chunk and must return the same each time,
    on every pipeline stage. ``begin_forward(chunk)`` is called before every forward of a chunk,
    ``begin_backward(chunk, last)`` before every backward, with ``last`` on the chunk's last one for a shard, and
    ``end_pass(chunk)`` after that one, before its first backward for the next shard. With ``training`` off nothing is
    differentiated. With ``overlap``, ranks with several chunks run passes while transfers are in flight; with one chunk
    the next pass mostly needs what is in flight.
    """

    iteration: int
    shards: tuple[int, ...]
    num_microbatches: int
    micro_batch_size: int
    seq_length: int
    batch: Callable[[int, int], Batch]
    begin_forward: Callable[[int], None] = _nothing
    begin_backward: Callable[[int, bool], None] = _nothing
    end_pass: Callable[[int], None] = _nothing
    training: bool = True
    overlap: bool = False

    def place(self, position: int) -> tuple[int, int]:
        """(logical shard, micro-batch in it) of the ``position``-th micro-batch of this rank, all passes counted."""
        number, index = divmod(position, self.num_microbatches)
        return self.shards[number], index

    def ends_pass(self, compute: Compute) -> bool:
        """Whether it is its chunk's last backward for a logical shard."""
        return compute.kind == "backward" and (compute.microbatch + 1) % self.num_microbatches == 0


class _Executor:
    """Tensors of one rank between its passes: inputs that arrived, outputs on their way, graphs awaiting backward."""

    def __init__(self, chunks: Sequence[Stage], groups: ProcessGroups, given: PipelineInput) -> None:
        self.chunks, self.groups, self.given = chunks, groups, given
        self.inputs: dict[Compute, torch.Tensor] = {}
        self.results: dict[Compute, torch.Tensor] = {}
        self.graphs: dict[Compute, tuple[torch.Tensor | None, GradientEdge]] = {}
        self.reports: Reports = {}
        self._started: deque[Waiting] = deque()
        self._complete = 0

    def forward(self, this: Compute) -> torch.Tensor:
        """Run a chunk; the output is detached, and the graph kept without it."""
        given, chunk = self.given, self.chunks[this.chunk]
        activation = self.inputs.pop(this, None)
        given.begin_forward(this.chunk)
        if activation is not None and given.training:
            activation.requires_grad_()
        shard, index = given.place(this.microbatch)
        microbatch = Microbatch(
            iteration=given.iteration,
            shard=shard,
            index=index,
            num_microbatches=given.num_microbatches,
            training=given.training,
        )
        output, report = chunk.forward(given.batch(shard, index), activation, microbatch)
        shape = chunk.boundary_shape(given.micro_batch_size, given.seq_length)
        if not chunk.is_last and (tuple(output.shape), output.dtype) != (tuple(shape), chunk.boundary_dtype):
            raise ValueError(f"chunk {this.chunk} gave {output.dtype}{tuple(output.shape)}, the next awaits {shape}")
        self.reports[this.chunk, shard, index] = report
        if given.training:
            backward = Compute("backward", this.chunk, this.microbatch)
            self.graphs[backward] = activation, get_gradient_edge(output)
            if chunk.is_last:
                self.inputs[backward] = torch.ones_like(output)
        return output.detach()

    def backward(self, this: Compute) -> torch.Tensor | None:
        """Differentiate a chunk; returns the gradient of its input, ``None`` on the first chunk."""
        activation, edge = self.graphs.pop(this)
        self.given.begin_backward(this.chunk, self.given.ends_pass(this))
        torch.autograd.backward((edge,), (self.inputs.pop(this),))
        return None if activation is None else activation.grad

    def work(self, this: Compute) -> None:
        """Do one pass and keep its result for the transfers, or for this rank's next chunk where it needs none."""
        step = 1 if this.kind == "forward" else -1
        result = self.forward(this) if this.kind == "forward" else self.backward(this)
        ends = self.chunks[this.chunk].is_last if this.kind == "forward" else self.chunks[this.chunk].is_first
        if ends or result is None:
            return
        if self.groups.pp.size == 1:
            self.inputs[Compute(this.kind, this.chunk + step, this.microbatch)] = result
        else:
            self.results[this] = result.contiguous()

    def _receive_buffer(self, transfer: Transfer) -> tuple[int, torch.Tensor]:
        chunk = self.chunks[transfer.use.chunk]
        shape = chunk.boundary_shape(self.given.micro_batch_size, self.given.seq_length)
        buffer = torch.empty(shape, dtype=chunk.boundary_dtype, device=self.groups.device)
        self.inputs[transfer.use] = buffer
        return transfer.peer, buffer

    def complete_transfers(self, ticks: int) -> None:
        """Wait for the transfers of the first ``ticks`` ticks."""
        while self._complete < ticks:
            self._started.popleft()()
            self._complete += 1

    def run(self, tick: Tick) -> None:
        """One forward or backward once its input is there, then its transfers, then the end of a logical shard's pass
        if this was its last."""
        self.complete_transfers(tick.waits)
        if tick.compute is not None:
            self.work(tick.compute)
        # A rank does one pass per tick, so everything it sends is that pass's result.
        sends = [(transfer.peer, self.results.pop(tick.compute)) for transfer in tick.sends]
        receives = [self._receive_buffer(transfer) for transfer in tick.receives]
        self._started.append(start_exchange(self.groups.pp, sends, receives))
        # After the transfers, so that no other stage waits for this one's reduction.
        if tick.compute is not None and self.given.ends_pass(tick.compute):
            self.given.end_pass(tick.compute.chunk)


def run_pipeline(chunks: Sequence[Stage], groups: ProcessGroups, given: PipelineInput) -> Reports:
    """All micro-batches of all shards forward and, in training, backward through this rank's chunks, in one schedule.

    ``chunks`` are in order of virtual stage and equally many on every rank. Each chunk's backwards run in ascending
    micro-batch order, so its main gradients are sums in that order at every pipeline size. Returns every report of
    this rank.
    """
    total = len(given.shards) * given.num_microbatches
    overlap = given.overlap and len(chunks) > 1
    plan = plan_pipeline(groups.pp.size, len(chunks), total, forward_only=not given.training, overlap=overlap)
    executor, ticks = _Executor(chunks, groups, given), plan.ranks[groups.pp.rank]
    with torch.set_grad_enabled(given.training):
        for tick in ticks:
            executor.run(tick)
    executor.complete_transfers(len(ticks))
    return executor.reports
