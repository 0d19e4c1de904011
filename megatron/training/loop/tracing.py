"""Tracing: puts probes around the parts of a run while it is built, and records the chosen steps.

A run without --trace-dir has no ``Tracing`` and no probe anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.contracts.batch import Batch
from megatron.core.contracts.stage import Stage
from megatron.core.ops.registry import OpTable
from megatron.core.optimizer.state_digests import WEIGHTS, Held, Written
from megatron.core.process_groups.collectives import barrier
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.probed import ProbedSums, probe_groups
from megatron.core.trace.dump import Dump
from megatron.core.trace.format import LEVELS, dump_folder, trace_file
from megatron.core.trace.module_hooks import probe_modules
from megatron.core.trace.op_mode import OpMode
from megatron.core.trace.probed_ops import DISPATCH_OPS, probe_ops
from megatron.core.trace.probed_stage import ProbedStage
from megatron.core.trace.reader import Note, unseen
from megatron.core.trace.recorder import Recorder
from megatron.core.trace.tensor_digest import Digester
from megatron.training.config.manifest import trace_folder_problems
from megatron.training.config.trace import TraceConfig, traced_iterations, traced_ranks
from megatron.training.data.batches import BatchReader
from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics
from megatron.training.observe.trace_writer import TraceWriter, write_trace_manifest

DUMP_LIMIT_BYTES = 256 << 20

Digests: TypeAlias = Callable[[Written], tuple[Sequence[Held], torch.Tensor]]
"""A part of the state: what a rank holds of it, and its digests ``[n, 2]``."""


class Tracing:
    """The trace of one run; every rank holds one, also a rank that is not traced."""

    def __init__(self, config: TraceConfig, groups: ProcessGroups) -> None:
        self._config, self._real = config, groups
        self._folder, self._rank = Path(config.trace_dir), groups.world.rank
        self._first, self._last = traced_iterations(config)
        self._ranks = traced_ranks(config, groups.world.size)
        self._depth = LEVELS.index(config.trace_level)
        self._writer = TraceWriter()
        dump = None
        if config.trace_dump is not None:
            dump = Dump(self._folder / dump_folder(self._rank), config.trace_dump, DUMP_LIMIT_BYTES)
        trusting = self._depth < LEVELS.index("op")
        traced = self._rank in self._ranks
        self.recorder = Recorder(self._writer.write, dump, trusting=trusting) if traced else None

    def groups(self) -> ProcessGroups:
        """The process groups everything is to be built with."""
        return self._real if self.recorder is None else probe_groups(self._real, self.recorder)

    def ops(self, table: OpTable) -> OpTable:
        """The ops everything is to be built with; the recorder makes its digests with the table's own."""
        if self.recorder is None:
            return table
        self.recorder.reader.digester = Digester(table["digest_words"], table["digest_rows"])
        if self._depth < LEVELS.index("module"):
            return table
        return probe_ops(table, self.recorder, None if self._depth >= LEVELS.index("op") else DISPATCH_OPS)

    def sums(self, sums: FloatSums) -> FloatSums:
        """The sums everything is to be built with."""
        return sums if self.recorder is None else ProbedSums(sums, self.recorder)

    def step(self, step: TrainStep) -> TrainStep:
        """Put the step's own parts under watch: its chunks, its reduction, its optimizer."""
        if self.recorder is None:
            return step
        real, groups = step.chunks, step.groups
        if self._depth >= LEVELS.index("module"):
            for chunk in real:
                if isinstance(chunk, torch.nn.Module):
                    probe_modules(chunk, self.recorder, parts=self._depth >= LEVELS.index("op"))
        stages = [
            ProbedStage(chunk, n * groups.pp.size + groups.pp.rank, self.recorder) for n, chunk in enumerate(real)
        ]
        step.chunks = stages
        return cast(TrainStep, TracedStep(step, self, real, self.recorder))

    def open(self, manifest: dict[str, dict]) -> None:
        """Create the files, before the first step; collective.

        Raises:
            ConfigError: the folder holds a trace already.
        """
        problems = trace_folder_problems(self._folder)
        barrier(self._real.world)
        if problems:
            raise ConfigError(problems)
        window = [self._first, self._last]
        if self._real.world.is_first:
            what = {"level": self._config.trace_level, "iterations": window, "ranks": list(self._ranks)}
            write_trace_manifest(self._folder, manifest, what)
        if self.recorder is not None:
            at = dataclasses.asdict(self._real.at)
            head = {"rank": self._rank, "world": self._real.world.size, "at": at, "level": self._config.trace_level}
            self._writer.open(self._folder / trace_file(self._rank), head)

    @contextmanager
    def recording(self, iteration: int) -> Iterator[bool]:
        """Around a step; true inside where it is recorded. What was recorded is written also if an error ends it."""
        recorder = self.recorder
        if recorder is None or iteration < self._first or (self._last is not None and iteration > self._last):
            yield False
            return
        complete = False
        recorder.begin_step()
        try:
            with ExitStack() as stack:
                if self._depth >= LEVELS.index("op"):
                    stack.enter_context(OpMode(recorder))
                yield True
            complete = True
        finally:
            recorder.end_step(iteration, complete=complete)

    def checkpoint(self, what: str, iteration: int, digests: Mapping[str, Sequence[int]]) -> None:
        """``loaded``, ``save_started`` or ``save_finished``, between steps; ``digests`` are those of what this rank
        loaded or saves, by key. Saves outside the traced iterations are left out."""
        late = self._last is not None and iteration > self._last
        if self.recorder is None or late or (iteration < self._first and what != "loaded"):
            return
        lanes = torch.tensor(list(digests.values()), dtype=torch.int64).view(-1, 2)
        reader = self.recorder.reader
        outs = reader.note_digests(reader.starts((key, torch.int64, 0) for key in digests), lanes)
        self.recorder.segment("checkpoint", iteration)
        self.recorder.event("checkpoint", what, outs=outs, scope="checkpoint")
        self.recorder.flush()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        if self.recorder is not None:
            try:
                self.recorder.writer.settle()
            finally:
                self._writer.close(self.recorder.events)


class _Part:
    """A part of the state, by parameter: what a rank holds of it, and what a line says of each up to its digest."""

    def __init__(self, held: Sequence[Held], recorder: Recorder) -> None:
        self.held, self._recorder = held, recorder
        self.labels = [f"{h.kind} of {h.name}{list(h.shards)}+{h.start}" for h in held]
        what = ((label, h.dtype, h.numel) for label, h in zip(self.labels, held, strict=True))
        self.starts = recorder.reader.starts(what)

    def show(self, notes: Sequence[Note], at: str) -> None:
        """One event per parameter and state tensor."""
        for held, note in zip(self.held, notes, strict=True):
            meta = {"shards": held.shards, "start": held.start, "at": at}
            name = "weights" if held.kind == WEIGHTS else held.kind
            self._recorder.event("state", name, outs=(note,), scope=held.name, meta=meta)


class TracedStep:
    """A TrainStep whose ``run`` is recorded where the window says so; everything else is the step's own."""

    def __init__(self, step: TrainStep, tracing: Tracing, chunks: Sequence[Stage], recorder: Recorder) -> None:
        self._step, self._tracing, self._chunks = step, tracing, chunks
        self._recorder, self._reader, self._digests = recorder, recorder.reader, step.optimizer.held_digests
        self._weights = _Part(self._digests.weights_held, recorder)
        self._state = _Part(self._digests.state_held, recorder)
        self._final = _Part(self._digests.gradients_held, recorder)
        params = {param.spec.name: param for buffer in step.ddp.buffers for param in buffer.params}
        self._params = [
            (label, params[h.name]) for label, h in zip(self._weights.labels, self._weights.held, strict=True)
        ]
        step.ddp = cast(Any, _Watched(step.ddp, finalize_model_grads=self._finalize))
        step.optimizer = cast(Any, _Watched(step.optimizer, step=self._optimize))
        self._iteration, self._left = 0, -1
        self._gradients: list[Note] = []
        self._promised: list[Note] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def run(self, reader: BatchReader, iteration: int, consumed_samples: int, *, digest: bool = False) -> StepMetrics:
        """As ``TrainStep.run``."""
        self._iteration = iteration
        reader = cast(BatchReader, _Watched(reader, read=self._read_batch))
        with self._tracing.recording(iteration) as recorded:
            if recorded:
                self._recorder.segment("state", iteration)
                self._show_before()
            try:
                return self._step.run(reader, iteration, consumed_samples, digest=digest)
            finally:
                self._keep_promise()

    def _read_batch(self, read: Callable[..., Batch], *args: int) -> Batch:
        """As ``read``, which is no computation of the run: what was read shows as the input of a chunk."""
        with unseen():
            batch = read(*args)
        self._reader.unwritten.made(batch)
        return batch

    def _show_before(self) -> None:
        """What the step starts from: working weights and, unless they were shown as what the step before left, masters
        and moments."""
        # As the model reads them: a layout-free digest of them takes three times as long.
        for buffer in self._step.ddp.buffers:
            buffer.complete_weights()
        self._weights.show(self._reader.noted(self._params), "before")
        self._show_expert_bias("before")
        if self._left != self._iteration - 1:
            self._state.show(self._read(self._state, self._digests.state), "before")

    def _show_expert_bias(self, at: str) -> None:
        for chunk in self._chunks:
            for router in chunk.balanced_routers():
                outs = self._reader.note(router.expert_bias_E, "expert_bias")
                meta = {"shards": (0,), "at": at}
                self._recorder.event("state", "expert_bias", outs=outs, scope=router.name, meta=meta)

    def _read(self, part: _Part, digests: Digests, written: Written = None) -> list[Note]:
        """A note of each that this rank holds of a part of the state."""
        with unseen():
            return self._reader.note_digests(part.starts, digests(written)[1])

    def _finalize(self, finalize: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.active:
            return finalize(*args, **kwargs)
        recorder, reader, ddp = self._recorder, self._reader, self._step.ddp
        recorder.segment("optimizer", self._iteration)
        leaves = reader.trusting and ddp.leaves_gradients(*args, **kwargs)
        before = [] if leaves else [reader.note(buffer.grads, f"buffer.{n}") for n, buffer in enumerate(ddp.buffers)]
        result = finalize(*args, **kwargs)
        if reader.trusting and self._step.replay is None:
            # The step reads them anyway, and makes their digests then; nobody changes them before.
            self._gradients = reader.promise(self._final.starts)
            self._promised = self._gradients
        else:
            self._gradients = self._read(self._final, self._digests.gradients)
        ins = self._gradients if leaves else [note for notes in before for note in notes]
        recorder.event("stage", "finalize_model_grads", ins=ins, outs=self._gradients, scope="gradients")
        return result

    def _optimize(self, take_step: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.active:
            return take_step(*args, **kwargs)
        text = ", ".join(f"{key}={value!r}" for key, value in kwargs.items() if key != "digest")
        # The step makes the digests of what it writes; reading all of it again would cost more. Where it is made of
        # operations that are recorded it may not.
        kwargs["digest"] = self._reader.trusting or self._step.groups.device.type == "cuda"
        kwargs["digest_grad"] = bool(self._promised)
        result = take_step(*args, **kwargs)
        written = self._step.optimizer.written
        self._keep_promise(written)
        notes = self._read(self._state, self._digests.state, written)
        ins = self._gradients
        self._recorder.event("stage", "optimizer_step", ins=ins, outs=notes, scope="optimizer", args=text)
        self._weights.show(self._read(self._weights, self._digests.weights, written), "after")
        self._show_expert_bias("after")
        self._state.show(notes, "after")
        self._left = self._iteration
        return result

    def _keep_promise(self, written: Written = None) -> None:
        """Bring the digests of the final gradient that are owed, also where the step was not taken."""
        owed, self._promised = self._promised, []
        if owed:
            with unseen():
                self._reader.keep(owed, self._digests.gradients(written)[1])


class _Watched:
    """Stands for ``inner``, also where something is set; the named methods are called through a function that gets the
    original first."""

    def __init__(self, inner: Any, **watchers: Any) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_watchers", watchers)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self._watchers:
            return method
        return lambda *args, **kwargs: self._watchers[name](method, *args, **kwargs)
