"""pretrain: the training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megatron.core.models.hybrid.hybrid_layer_allocation import LAYER_SYMBOLS
from megatron.training.config.resolve import pattern_of
from megatron.training.config.run import RunConfig
from megatron.training.data.batches import BatchReader
from megatron.training.loop.build import Run, build_run
from megatron.training.loop.exit import ExitRule
from megatron.training.loop.fingerprints import Fingerprints, run_manifest
from megatron.training.observe.flops import flops_per_sample
from megatron.training.observe.log_line import LogLineFormat
from megatron.training.observe.observers import Observer, build_observers
from megatron.training.observe.run_manifest import write_json
from megatron.training.setup.distributed import stop_process_group
from megatron.training.setup.environment import find_launch, read_environment


def pretrain(config: RunConfig) -> None:
    """Train to the end of the configuration; ``config`` comes from ``checked_config``.

    Raises:
        ConfigError, DamagedInputError, TrainingStoppedError: see their texts; the process ends with their exit code.
    """
    started = time.monotonic()
    run = build_run(config, find_launch(read_environment()))
    manifest = run_manifest(run, start_iteration=0)
    fingerprints = Fingerprints(run, manifest) if run.config.fingerprint.fingerprint_dir else None
    observers = _observers(run, manifest)
    try:
        _train(run, observers, fingerprints, ExitRule(run.config.training, started))
    finally:
        for observer in observers:
            observer.close()
        if fingerprints is not None:
            fingerprints.close()
    stop_process_group()


def _train(run: Run, observers: Sequence[Observer], fingerprints: Fingerprints | None, exits: ExitRule) -> None:
    training = run.config.training
    reader = run.reader(run.splits.train)
    reader.require(0, training.train_iters)
    valid = run.reader(run.splits.valid) if run.splits.valid is not None and training.eval_interval else None
    consumed = consumed_valid = 0
    for iteration in range(1, training.train_iters + 1):
        step = run.step.run(reader, iteration, consumed)
        consumed = step.consumed_samples
        if fingerprints is not None:
            fingerprints.on_step(step, reader)
        for observer in observers:
            observer.on_step(step)
        last = iteration == training.train_iters
        if valid is not None and (last or iteration % training.eval_interval == 0):
            consumed_valid = _evaluate(run, valid, observers, iteration, consumed, consumed_valid)
        reason = exits.reason_after(iteration, run.groups)
        if reason is not None:
            if run.groups.world.is_first:
                print(f"exiting program {reason}", flush=True)
            break
    for source in (reader, valid):
        if source is not None:
            source.close()


def _evaluate(
    run: Run, valid: BatchReader, observers: Sequence[Observer], iteration: int, consumed: int, consumed_valid: int
) -> int:
    """Evaluate once and tell the observers; returns the validation samples consumed so far."""
    batches = run.config.training.eval_iters
    if batches == 0:
        return consumed_valid
    losses = run.step.evaluate(valid, batches, iteration, consumed_valid)
    for observer in observers:
        observer.on_validation(iteration, consumed, losses)
    return consumed_valid + batches * run.config.training.global_batch_size


def _observers(run: Run, manifest: dict[str, dict]) -> list[Observer]:
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
    observers = build_observers(logging, shape, start_iteration=0)
    if logging.run_dir:
        write_json(Path(logging.run_dir) / "manifest.json", manifest)
    return observers


def _flops(config: RunConfig) -> float:
    pattern = pattern_of(config.model)
    counts = {symbol: pattern.count(symbol) for symbol in LAYER_SYMBOLS}
    return flops_per_sample(config.model, counts, config.tokenizer.padded_vocab_size)
