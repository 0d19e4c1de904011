"""GradientPasses: the passes of a step, ended chunk by chunk, bucket by bucket, in one running sum per bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.contracts.stage import Stage
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.distributed.readiness import Readiness, Unit
from megatron.core.process_groups.collectives import Waiting, nothing_to_wait_for
from megatron.core.process_groups.lane import Lane
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.running_fold import RunningFold
from megatron.core.process_groups.topology import LogicalLayout


def plan_units(buffers: Sequence[ParamAndGradBuffer], chunks: Sequence[Stage]) -> list[list[Unit]]:
    """By chunk, the buckets that it fills, in the order in which their gradients become complete: what was registered
    last first, except that a last stage's own use of a parameter of both ends comes before its layers.

    The order is a function of the model alone, so all ranks of a stage have the same one.
    """
    return [_units_of(buffers, chunk, stage) for chunk, stage in enumerate(chunks)]


def _units_of(buffers: Sequence[ParamAndGradBuffer], chunk: int, stage: Stage) -> list[Unit]:
    place = {id(param): number for number, param in enumerate(stage.model_parameters())}
    found: list[tuple[bool, int, Unit]] = []
    for number, buffer in enumerate(buffers):
        early = bool(buffer.plan.key.two_stage) and stage.is_last and not stage.is_first
        for leaf, bucket in buffer.filled_by(chunk):
            params = buffer.params_in(bucket)
            views = tuple(param.main_grads[leaf] for param in params)
            unit = Unit(buffer=number, leaf=leaf, bucket=bucket, params=params, views=views)
            found.append((not early, -min(place[id(param)] for param in params), unit))
    return [unit for *_, unit in sorted(found, key=lambda entry: entry[:2])]


class GradientPasses:
    """Sums the main gradients over logical shards (experts: over logical expert groups), a pass at a time.

    A rank works on shard v in pass v // DP, so the ranks' gradients of one pass are consecutive shards, and the blocked
    fold goes on where the pass before stopped. What it carries from pass to pass are at most two fp32 tensors of the
    rank's own part of a bucket; with one pass nothing. The sum ends up in the owned spans of the gradient buffers.
    ``in_bf16`` rounds every rank's gradient of a pass to bfloat16, once, before it travels; sums are fp32 in any case.

    With ``overlap`` a bucket leaves as soon as its gradients are complete, in a lane beside the backward; without, at
    the end of the pass. Either way in the order of ``plan_units``, one chunk's after the other's.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        sums: FloatSums,
        layout: LogicalLayout,
        *,
        units: Sequence[Sequence[Unit]],
        device: torch.device,
        num_passes: int,
        in_bf16: bool = False,
        overlap: bool = False,
    ) -> None:
        self._buffers, self._sums, self._layout = tuple(buffers), sums, layout
        self._num_passes, self._in_bf16 = num_passes, in_bf16
        self._units = units
        self._lane = Lane(device, beside=overlap)
        self._readiness = Readiness(self._units, self._send) if overlap else None
        self._ended = [0] * len(units)
        # Chunks some of whose gradients may still be leaving.
        self._leaving: set[int] = set()
        self._running: dict[tuple[int, int, int], RunningFold] = {}

    def start(self) -> None:
        """Begin a step."""
        self._ended = [0] * len(self._ended)
        self._running.clear()

    def begin_backward(self, chunk: int, last: bool) -> None:
        """Before every backward of a chunk; ``last``: it is the chunk's last one for a logical shard.

        Raises:
            LateGradientError: a gradient of the pass before arrived after it was sent.
        """
        self._join(chunk)
        if last and self._readiness is not None:
            self._readiness.watch(chunk)

    def end(self, chunk: int) -> None:
        """End a chunk's pass.

        Raises:
            RuntimeError: the step has no further pass, or a gradient is where it would be lost.
        """
        if self._ended[chunk] == self._num_passes:
            raise RuntimeError(f"chunk {chunk} has ended its {self._num_passes} passes already")
        for number in dict.fromkeys(unit.buffer for unit in self._units[chunk]):
            _check_nothing_is_lost(self._buffers[number])
        if self._readiness is None:
            for unit in self._units[chunk]:
                self._send(chunk, unit)
        else:
            self._readiness.end(chunk)
        self._ended[chunk] += 1

    def finish(self) -> None:
        """End the last pass of every chunk that has not done so, and wait for everything that was sent.

        Raises:
            RuntimeError: a chunk lacks more than that, or a gradient arrived after it was sent.
        """
        for chunk, ended in enumerate(self._ended):
            if ended < self._num_passes - 1:
                raise RuntimeError(f"chunk {chunk} has ended {ended} of {self._num_passes} passes")
            if ended < self._num_passes:
                self.end(chunk)
        for chunk in range(len(self._ended)):
            self._join(chunk)

    @property
    def add_nothing(self) -> bool:
        """Whether every sum has one term, which stays where it is."""
        return all(self._stays(buffer) for buffer in self._buffers)

    def _stays(self, buffer: ParamAndGradBuffer) -> bool:
        return buffer.group.size == 1 and self._num_passes == 1 and not self._in_bf16

    def used(self, chunk: int) -> set[int]:
        """As ``Readiness.used``; nothing without overlap."""
        return set() if self._readiness is None else self._readiness.used(chunk)

    def _join(self, chunk: int) -> None:
        if chunk not in self._leaving:
            return
        if self._readiness is not None:
            self._readiness.check_nothing_came_late(chunk)
        self._lane.join()
        self._leaving.discard(chunk)

    def _send(self, chunk: int, unit: Unit) -> None:
        last = self._ended[chunk] == self._num_passes - 1
        self._leaving.add(chunk)
        self._lane.begin(lambda: self._reduce(unit, last))

    def _reduce(self, unit: Unit, last: bool) -> Waiting:
        buffer, place = self._buffers[unit.buffer], (unit.buffer, unit.leaf, unit.bucket)
        buffer.record_extremes(unit.leaf, unit.bucket)
        if self._stays(buffer):
            # The sum of one contribution is that contribution, and lies where it belongs.
            return nothing_to_wait_for
        flat = buffer.bucket(unit.leaf, unit.bucket)
        running = self._running.pop(place, None) or self._start_fold(buffer)
        # Rounded on one rank too, so that a shard's gradient is the same wherever it was made.
        given = flat.to(torch.bfloat16) if self._in_bf16 else flat
        added = self._sums.reduce_scatter_part(buffer.group, given, running)

        def complete() -> None:
            added()
            if last:
                buffer.own_part(unit.leaf, unit.bucket).copy_(running.result())
            else:
                self._running[place] = running
                flat.zero_()

        return complete

    def _start_fold(self, buffer: ParamAndGradBuffer) -> RunningFold:
        layout = self._layout
        if buffer.plan.key.expert:
            return self._sums.start_fold(buffer.group, layout.expert_groups, layout.expert_block)
        return self._sums.start_fold(buffer.group, layout.ldp, layout.block)


def _check_nothing_is_lost(buffer: ParamAndGradBuffer) -> None:
    lost = [param.spec.name for param in buffer.params if param.grad is not None]
    if lost:
        raise RuntimeError(f"gradients arrived in .grad instead of the main gradient and would be lost: {lost}")
