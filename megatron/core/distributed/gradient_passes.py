"""GradientPasses: the passes of a step, ended chunk by chunk, bucket by bucket, in one running sum per bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.running_fold import RunningFold
from megatron.core.process_groups.topology import LogicalLayout


class GradientPasses:
    """Sums the main gradients over logical shards (experts: over logical expert groups), a pass at a time.

    A rank works on shard v in pass v // DP, so the ranks' gradients of one pass are consecutive shards, and the blocked
    fold goes on where the pass before stopped. What it carries from pass to pass are at most two fp32 tensors of the
    rank's own part of a bucket; with one pass nothing. The sum ends up in the owned spans of the gradient buffers.
    ``in_bf16`` rounds every rank's gradient of a pass to bfloat16, once, before it travels; sums are fp32 in any case.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        sums: FloatSums,
        layout: LogicalLayout,
        *,
        num_passes: int,
        num_chunks: int,
        in_bf16: bool = False,
    ) -> None:
        self._buffers, self._sums, self._layout = tuple(buffers), sums, layout
        self._num_passes, self._in_bf16 = num_passes, in_bf16
        self._ended = [0] * num_chunks
        self._running: dict[tuple[int, int, int], RunningFold] = {}

    def start(self) -> None:
        """Begin a step."""
        self._ended = [0] * len(self._ended)
        self._running.clear()

    def end(self, chunk: int) -> None:
        """End a chunk's pass.

        Raises:
            RuntimeError: the step has no further pass, or a gradient is where it would be lost.
        """
        if self._ended[chunk] == self._num_passes:
            raise RuntimeError(f"chunk {chunk} has ended its {self._num_passes} passes already")
        self._ended[chunk] += 1
        last = self._ended[chunk] == self._num_passes
        for number, buffer in enumerate(self._buffers):
            filled = list(buffer.filled_by(chunk))
            if filled:
                _check_nothing_is_lost(buffer)
            for leaf, bucket in filled:
                self._reduce(number, leaf, bucket, last)

    def finish(self) -> None:
        """End the last pass of every chunk that has not done so.

        Raises:
            RuntimeError: a chunk lacks more than that.
        """
        for chunk, ended in enumerate(self._ended):
            if ended < self._num_passes - 1:
                raise RuntimeError(f"chunk {chunk} has ended {ended} of {self._num_passes} passes")
            if ended < self._num_passes:
                self.end(chunk)

    def _reduce(self, number: int, leaf: int, bucket: int, last: bool) -> None:
        buffer = self._buffers[number]
        buffer.record_extremes(leaf, bucket)
        flat = buffer.bucket(leaf, bucket)
        running = self._running.pop((number, leaf, bucket), None) or self._start_fold(buffer)
        # Rounded on one rank too, so that a shard's gradient is the same wherever it was made.
        self._sums.reduce_scatter_part(buffer.group, flat.to(torch.bfloat16) if self._in_bf16 else flat, running)
        if last:
            buffer.own_part(leaf, bucket).copy_(running.result())
        else:
            self._running[number, leaf, bucket] = running
            flat.zero_()

    def _start_fold(self, buffer: ParamAndGradBuffer) -> RunningFold:
        layout = self._layout
        if buffer.plan.key.expert:
            return self._sums.start_fold(buffer.group, layout.expert_groups, layout.expert_block)
        return self._sums.start_fold(buffer.group, layout.ldp, layout.block)


def _check_nothing_is_lost(buffer: ParamAndGradBuffer) -> None:
    lost = [param.spec.name for param in buffer.params if param.grad is not None]
    if lost:
        raise RuntimeError(f"gradients arrived in .grad instead of the main gradient and would be lost: {lost}")
