"""ReplayCheck: every so many steps, a step is computed twice from the same state and compared before it is taken.

Both computations are recorded in memory as a trace by module: inputs and outputs of every module in both directions,
everything that travels, each rank's own gradient before it is reduced, then losses, final gradient, norm, and the
state that the update starts from. The first event that differs on a rank says what it computed, or was sent,
differently; ranks that only received are told apart from those that made the difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.contracts.stage import Stage
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.ops.digest_pieces.definition import words_of
from megatron.core.ops.digest_pieces.table import PieceAt, PieceTable
from megatron.core.ops.registry import OpTable
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.state_digests import Held
from megatron.core.process_groups.collectives import gather_objects, maximum
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.probed import probe_groups
from megatron.core.trace.module_hooks import probe_modules
from megatron.core.trace.probed_stage import ProbedStage
from megatron.core.trace.reader import unseen
from megatron.core.trace.recorder import Recorder
from megatron.core.trace.tensor_digest import Digester
from megatron.training.loop.recorded import first_mismatch
from megatron.training.loop.reports import StepLosses
from megatron.training.setup.environment import host_name
from megatron.training.setup.seeds import generator_states, restore_generators

_RANKS_SHOWN = 4

Compute = Callable[[], StepLosses]
"""Losses and final gradients of a step; of what it starts from it moves nothing but the chunks' buffers."""


class Watched(Protocol):
    """What a step is made of; its stages are called through ``chunks``."""

    chunks: Sequence[Stage]
    ddp: DistributedDataParallel
    optimizer: Optimizer
    replay: ReplayCheck | None


@dataclass(frozen=True, slots=True)
class _Computed:
    """One computation: what was recorded, and what came of it."""

    lines: bytes
    losses: StepLosses | None
    error: TrainingStoppedError | None


class ReplayCheck:
    """The check of one run; every rank holds one. Call ``groups`` before anything is built, ``attach`` after."""

    def __init__(self, interval: int, ops: OpTable) -> None:
        self._interval, self._digest_pieces = interval, ops["digest_pieces"]
        self._lines: list[bytes] = []
        self._recorder = Recorder(self._lines.append)
        self._recorder.reader.digester = Digester(ops["digest_words"], ops["digest_rows"])
        self._tables: dict[tuple[int, int], tuple[PieceTable, list[str]]] = {}

    def groups(self, groups: ProcessGroups) -> ProcessGroups:
        """The process groups everything is to be built with."""
        self._real = groups
        return probe_groups(groups, self._recorder)

    def attach(self, step: Watched, tracing: Recorder | None) -> None:
        """Watch a step that is built; ``tracing`` records it too, but only one of two computations."""
        self._step, self._tracing = step, tracing
        step.replay = self
        self._modules = [chunk for chunk in step.chunks if isinstance(chunk, torch.nn.Module)]
        self._buffers, self._optimizer = step.ddp.buffers, step.optimizer

    def run(self, compute: Compute, iteration: int) -> StepLosses:
        """What ``compute`` gives; where the check is due it is called twice. Call it on all ranks.

        Raises:
            TrainingStoppedError: the two computations differ; on every rank, naming ranks and first tensors. What the
                step starts from is as it was.
        """
        if iteration % self._interval:
            return compute()
        buffers, generators = [(b, b.clone()) for m in self._modules for b in m.buffers()], generator_states()

        def back_to_the_start() -> None:
            for buffer, value in buffers:
                buffer.copy_(value)
            restore_generators(generators)

        first = self._recorded(compute, iteration)
        back_to_the_start()
        with self._without_tracing():
            second = self._recorded(compute, iteration)
        mismatch = first_mismatch(first.lines, second.lines)
        world = self._real.world
        unequal = torch.tensor(int(mismatch is not None), dtype=torch.int64, device=self._real.device)
        with self._without_tracing():
            anywhere = bool(maximum(world, unequal))
        if anywhere:
            back_to_the_start()
            found = None if mismatch is None else (mismatch, host_name())
            raise TrainingStoppedError(verdict(iteration, gather_objects(world, found)))
        if second.losses is None:
            raise second.error or TrainingStoppedError(f"iteration {iteration}: no losses")
        return second.losses

    @contextmanager
    def _without_tracing(self) -> Iterator[None]:
        tracing = self._tracing
        if tracing is None or not tracing.active:
            yield
            return
        tracing.active = False
        try:
            yield
        finally:
            tracing.active = True

    def _recorded(self, compute: Compute, iteration: int) -> _Computed:
        recorder, losses, stopped = self._recorder, None, None
        self._lines.clear()
        recorder.begin_step()
        try:
            with self._watching():
                recorder.segment("state", iteration)
                self._show(self._optimizer.held_digests.weights)
                try:
                    losses = compute()
                except TrainingStoppedError as error:  # on all ranks together
                    stopped = error
                recorder.segment("optimizer", iteration)
                recorder.event("stage", "losses", scope="step", args=str(losses or stopped))
                if losses is not None:
                    self._show_results()
        finally:
            recorder.end_step(iteration, complete=True)
            recorder.writer.settle()
        return _Computed(b"".join(self._lines), losses, stopped)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Hooks on modules, chunks and buffers, for one computation."""
        recorder, chunks, pp = self._recorder, self._step.chunks, self._real.pp
        handles = [handle for module in self._modules for handle in probe_modules(module, recorder)]
        self._step.chunks = [ProbedStage(c, n * pp.size + pp.rank, recorder) for n, c in enumerate(chunks)]
        for number, buffer in enumerate(self._buffers):
            buffer.watch = functools.partial(self._show_bucket, number)
        try:
            yield
        finally:
            self._step.chunks = chunks
            for buffer in self._buffers:
                buffer.watch = None
            for handle in handles:
                handle.remove()

    def _show(self, read: Callable[[], tuple[list[Held], torch.Tensor]]) -> None:
        """One event per parameter and tensor."""
        with unseen():
            held, digests = read()
            reader = self._recorder.reader
            notes = reader.note_digests(reader.starts((h.kind, h.dtype, h.numel) for h in held), digests)
        for what, note in zip(held, notes, strict=True):
            self._recorder.event("state", what.kind, outs=[note], scope=what.name)

    def _show_bucket(self, number: int, leaf: int, bucket: int) -> None:
        """This rank's own gradient in a bucket, by piece, before it meets those of other ranks."""
        buffer = self._buffers[number]
        if (number, bucket) not in self._tables:
            span = buffer.whole[bucket]
            pieces = [
                PieceAt(name=p.spec.name, shard=p.shard, start=p.start, length=p.length, offset=p.offset - span.start)
                for p in span.pieces
            ]
            starts = self._recorder.reader.starts((f"{p.name}[{p.shard}]", torch.float32, p.length) for p in pieces)
            self._tables[number, bucket] = PieceTable(pieces), starts
        table, starts = self._tables[number, bucket]
        with unseen():
            digests = self._digest_pieces(table, words_of(buffer.bucket(leaf, bucket)))[0]
            notes = self._recorder.reader.note_digests(starts, digests)
        scope = f"gradient buffer {number}.{leaf}, bucket {bucket}"
        self._recorder.event("stage", "local_gradient", outs=notes, scope=scope)

    def _show_results(self) -> None:
        """What the update works with."""
        recorder = self._recorder
        self._show(self._optimizer.held_digests.gradients)
        self._show(self._optimizer.held_digests.state)
        for module in self._modules:
            for name, buffer in module.named_buffers():
                recorder.event("state", "buffer", outs=recorder.reader.note(buffer, name), scope=name)
        with self._without_tracing():
            norm = self._optimizer.measured().norm
        recorder.event("stage", "grad_norm", scope="step", args=norm.hex())


def verdict(iteration: int, found: Sequence[object]) -> str:
    """What to say of each rank's ``(mismatch, host)``, or ``None``, in rank order."""
    mine = {rank: pair for rank, pair in enumerate(found) if isinstance(pair, tuple)}
    origins = {rank: pair for rank, pair in mine.items() if not pair[0].received} or mine
    said = [f"rank {rank} on {host}: {mismatch.what}" for rank, (mismatch, host) in origins.items()]
    more = f"; and {len(said) - _RANKS_SHOWN} more ranks" if len(said) > _RANKS_SHOWN else ""
    others = len(mine) - len(origins)
    received = f"; received by {others} more" if others else ""
    return (
        f"iteration {iteration}: computed twice from the same state, the results differ (silent data corruption). "
        f"First on {'; '.join(said[:_RANKS_SHOWN])}{more}{received}. The step was not taken; the last checkpoint is "
        "intact: test the machine (examples/fleet_health.sh) and go on from it without that machine."
    )
