"""pretrain: the training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron.core.models.hybrid.hybrid_layer_allocation import LAYER_SYMBOLS
from megatron.core.process_groups.groups import ProcessGroups
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.checkpoint.position import Position
from megatron.training.config.resolve import pattern_of
from megatron.training.config.run import RunConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.data.batches import BatchReader
from megatron.training.data.evaluation import evaluates_after
from megatron.training.loop.build import Run, build_run
from megatron.training.loop.exit import ExitRule
from megatron.training.loop.fingerprints import Fingerprints, run_manifest
from megatron.training.loop.garbage import GarbageControl
from megatron.training.observe.flops import flops_per_sample
from megatron.training.observe.log_line import LogLineFormat
from megatron.training.observe.observers import Observer, build_observers
from megatron.training.observe.run_folder import prepare_run_folder
from megatron.training.observe.step_profile import StepProfiler
from megatron.training.setup.cublas_workspace import settle_workspace
from megatron.training.setup.distributed import stop_process_group
from megatron.training.setup.environment import find_launch, read_environment


def pretrain(config: RunConfig) -> None:
    """Train to the end of the configuration; ``config`` comes from ``checked_config``.

    Raises:
        ConfigError, DamagedInputError, SaveFailedError, TrainingStoppedError: see their texts; the process ends with
            their exit code.
    """
    started = time.monotonic()
    run_training(build_run(config, find_launch(read_environment())), started)
    stop_process_group()


def run_training(run: Run, started: float) -> None:
    """Load, train to the end, save; ``started`` is the monotonic time the run began at, in seconds."""
    checkpoints = run.checkpointer()
    start = checkpoints.load()
    readers = _readers(run, start.position)
    run.step.start_schedule(start.schedule, start.schedule_start)
    manifest = run_manifest(run, start_iteration=start.position.iteration)
    manifest["trajectory"] = checkpoints.trajectory_with_branches(manifest["trajectory"])
    checkpoints.require_own_folder(manifest["trajectory"])
    settle_workspace(run.groups.device)
    fingerprints = Fingerprints(run, manifest) if run.config.fingerprint.fingerprint_dir else None
    if run.tracing is not None:
        run.tracing.open(manifest)
        if start.position.iteration:
            run.tracing.checkpoint("loaded", start.position.iteration, checkpoints.digests())
    observers = _observers(run, manifest, start.position)
    with contextlib.ExitStack() as closing:
        closing.callback(readers.close)
        if run.tracing is not None:
            closing.callback(run.tracing.close)
        if fingerprints is not None:
            closing.callback(fingerprints.close)
        for observer in reversed(observers):
            closing.callback(observer.close)
        settle = None if fingerprints is None else fingerprints.settle
        tell = None if run.tracing is None else run.tracing.checkpoint
        with checkpoints.begin(manifest["trajectory"], run.step.schedule, before_save=settle, tell=tell):
            _train(run, readers, observers, fingerprints, ExitRule(run.config.training, started), checkpoints)
            if settle is not None:
                settle()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Readers:
    """Readers of the splits; ``None`` for a split that is not read."""

    train: BatchReader | None = None
    valid: BatchReader | None = None
    test: BatchReader | None = None

    def close(self) -> None:
        """Stop reading ahead."""
        for reader in (self.train, self.valid, self.test):
            if reader is not None:
                reader.close()


def _readers(run: Run, position: Position) -> _Readers:
    """Readers of the samples that the rest of the run needs, made before anything is written.

    Raises:
        ConfigError: the data end before that.
    """
    training, step = run.config.training, run.step.shape
    iterations, consumed = _iterations(training, position), position.consumed_train_samples
    train = None if training.skip_train else run.reader(run.splits.train)
    if train is not None:
        train.require(consumed, step.batch_sizes.after(consumed, len(iterations)) - consumed, "training")
    if not training.eval_interval or not (iterations or training.skip_train):
        return _Readers(train=train)
    valid, test = run.valid_reader(), run.test_reader() if training.eval_iters else None
    if valid is not None and not training.full_validation:
        evaluations = sum(evaluates_after(training, i) for i in iterations) + training.skip_train
        needed = evaluations * step.evaluation.batches * step.evaluation.batch_size
        valid.require(position.consumed_valid_samples, needed, "validation")
    if training.full_validation and run.splits.valid is not None and run.groups.world.is_first:
        print(f"--full-validation: {len(run.splits.valid)} sequences each time", flush=True)
    absent = run.splits.absent.get("test") if training.eval_iters else None
    if absent is not None and not absent.chosen and run.groups.world.is_first:
        print(f"no test data ({absent.reason}): nothing is evaluated at the end of training", flush=True)
    if test is not None:
        test.require(0, training.eval_iters * step.evaluation.batch_size, "test")
    return _Readers(train=train, valid=valid, test=test)


def _train(
    run: Run,
    readers: _Readers,
    observers: Sequence[Observer],
    fingerprints: Fingerprints | None,
    exits: ExitRule,
    checkpoints: Checkpointer,
) -> None:
    training, position = run.config.training, checkpoints.position
    reader, valid, test = readers.train, readers.valid, readers.test
    checkpoints.restore_generators()
    garbage = GarbageControl(training)
    groups = run.groups
    profiler = StepProfiler(run.config.profile, run.config.logging.run_dir, groups.world.rank, groups.device)
    if training.skip_train and valid is not None:
        _evaluate(run, "valid", valid, observers, position)
    _say_if_nothing_is_left(training, position, groups)
    for iteration in _iterations(training, position):
        with profiler.step(iteration):
            digest = fingerprints is not None and fingerprints.wants_digests(iteration)
            step = run.step.run(reader, iteration, position.consumed_train_samples, digest=digest)
        if fingerprints is not None:
            fingerprints.on_step(step, reader)
        for observer in observers:
            observer.on_step(step)
        position = replace(position, iteration=iteration, consumed_train_samples=step.consumed_samples)
        garbage.after_step(iteration)
        if valid is not None and evaluates_after(training, iteration):
            with garbage.around_evaluation():
                position = _evaluate(run, "valid", valid, observers, position)
        reason = exits.reason_after(iteration, groups)
        checkpoints.after_step(position, leaving=reason is not None)
        if reason is not None:
            if groups.world.is_first:
                print(f"exiting program {reason}", flush=True)
            break
    profiler.close()
    run.step.settle()
    if not training.skip_train:
        checkpoints.after_step(position, leaving=True)
    # Whatever stopped the run after its last step: training is over, and no later launch evaluates them.
    if test is not None and not _iterations(training, position):
        with garbage.around_evaluation():
            _evaluate(run, "test", test, observers, position)
    garbage.release()


def _say_if_nothing_is_left(training: TrainingConfig, position: Position, groups: ProcessGroups) -> None:
    if groups.world.is_first and not training.skip_train and not _iterations(training, position):
        asked = f"{training.train_iters} iterations ({training.train_samples} samples) were asked for"
        change = "raise --train-iters or --train-samples, whichever is given, to go on"
        print(f"nothing is left to train: iteration {position.iteration} is reached, {asked}; {change}", flush=True)


def _iterations(training: TrainingConfig, position: Position) -> range:
    """The iterations that are still to do."""
    return range(0) if training.skip_train else range(position.iteration + 1, training.train_iters + 1)


def _evaluate(
    run: Run, split: Literal["valid", "test"], reader: BatchReader, observers: Sequence[Observer], position: Position
) -> Position:
    """Evaluate "valid" or "test" once and tell the observers; returns the position with the validation samples consumed
    so far."""
    shape, training = run.step.shape.evaluation, run.config.training
    batches = training.eval_iters if split == "test" else shape.batches
    goes_on = split == "valid" and not training.full_validation
    if batches == 0:
        return position
    first = position.consumed_valid_samples if goes_on else 0
    losses = run.step.evaluate(reader, batches, position.iteration, first)
    for observer in observers:
        observer.on_evaluation(split, position.iteration, position.consumed_train_samples, losses)
    return replace(position, consumed_valid_samples=first + batches * shape.batch_size) if goes_on else position


def _observers(run: Run, manifest: dict[str, dict], position: Position) -> list[Observer]:
    """The observers of this rank: all on the last rank, as in Megatron; none elsewhere. The run folder gets its
    manifest."""
    if not run.groups.world.is_last:
        return []
    config, logging = run.config, run.config.logging
    shape = LogLineFormat(
        train_iters=config.training.train_iters,
        world_size=run.groups.world.size,
        flops_per_sample=_flops(config) if logging.log_throughput else None,
    )
    if logging.run_dir:
        kept = prepare_run_folder(Path(logging.run_dir), manifest, start_iteration=position.iteration)
        if kept is not None:
            print(kept, flush=True)
    return build_observers(logging, shape, start_iteration=position.iteration)


def _flops(config: RunConfig) -> float:
    pattern = pattern_of(config.model)
    counts = {symbol: pattern.count(symbol) for symbol in LAYER_SYMBOLS}
    return flops_per_sample(config.model, counts, config.tokenizer.padded_vocab_size)
