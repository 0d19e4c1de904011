"""From a checked configuration to everything a training run is made of, each part built once and handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.contracts.stage import Stage
from megatron.core.datasets.sampler import Sampler
from megatron.core.datasets.splits import requested_sizes
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.hybrid.hybrid_layer_allocation import MOE
from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import OpTable, build_table
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.parallel_state import set_process_groups
from megatron.core.process_groups.collectives import gather_objects
from megatron.core.process_groups.groups import Placement, ProcessGroups, create_process_groups, gather_nodes
from megatron.core.process_groups.ordered_reduce import FloatSums, NativeSums, OrderedSums
from megatron.core.process_groups.topology import LogicalLayout
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.config.resolve import (
    eval_batch_sizes,
    known_batch_sizes,
    logical_layout,
    pattern_of,
    resolve_vocabulary,
    schedule_of,
    topology_of,
)
from megatron.training.config.run import RunConfig
from megatron.training.data.batches import BatchReader, SampleSource
from megatron.training.data.evaluation import EvalShape, WithoutLossBeyond, plan_full_validation
from megatron.training.data.provider import Dataset, Splits, build_datasets, data_digest, source_digests, tokenizer_from
from megatron.training.loop.replay import ReplayCheck
from megatron.training.loop.reports import ReportedLayers
from megatron.training.loop.step import StepShape, TrainStep
from megatron.training.loop.tracing import Tracing
from megatron.training.setup.determinism import pin_arithmetic
from megatron.training.setup.distributed import pick_device, start_process_group
from megatron.training.setup.environment import Launch, host_name
from megatron.training.setup.seeds import seed_generators


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a run is made of. ``config`` is complete, its vocabulary too."""

    config: RunConfig
    launch: Launch
    groups: ProcessGroups
    backend: str
    layout: LogicalLayout
    ops: OpTable
    chunks: Sequence[Stage]
    step: TrainStep
    splits: Splits
    data_digest: str
    tracing: Tracing | None = None

    def checkpointer(self) -> Checkpointer:
        """What loads and saves the state of this run; collective."""
        optimizer = self.step.optimizer
        return Checkpointer(self.config, self.layout, optimizer=optimizer, chunks=self.chunks, groups=self.groups)

    def reader(self, dataset: Dataset) -> BatchReader:
        """A reader of this rank's shards of a split, in micro-batches of training."""
        return self._reader(dataset, self.config.training.micro_batch_size)

    def valid_reader(self) -> BatchReader | None:
        """A reader of this rank's shards of the validation data, in micro-batches of an evaluation; ``None`` where
        there is no such data."""
        dataset, shape = self.splits.valid, self.step.shape.evaluation
        if dataset is None:
            return None
        if self.config.training.full_validation:
            padded = WithoutLossBeyond(dataset, shape.batches * shape.batch_size)
            return self._reader(padded, shape.micro_batch_size, in_order=True)
        return self._reader(dataset, shape.micro_batch_size)

    def test_reader(self) -> BatchReader | None:
        """The same of the test data, which are read in --eval-iters batches in any case."""
        dataset = self.splits.test
        return None if dataset is None else self._reader(dataset, self.step.shape.evaluation.micro_batch_size)

    def _reader(self, dataset: SampleSource, micro_batch_size: int, *, in_order: bool = False) -> BatchReader:
        data = self.config.data
        sampler = Sampler(
            total_samples=len(dataset),
            micro_batch_size=micro_batch_size,
            logical_data_parallel_size=self.layout.ldp,
            loader="cyclic" if data.dataloader_type == "cyclic" and not in_order else "single",
            data_sharding=data.data_sharding,
        )
        return BatchReader(
            dataset,
            sampler,
            shards=self.step.shape.shards,
            device=self.groups.device,
            num_workers=data.num_workers,
        )


def build_run(config: RunConfig, launch: Launch) -> Run:
    """Join the other ranks and build everything; ``config`` is resolved and validated, and the same on every rank.

    From here to ``stop_process_group``, ``megatron.core.parallel_state`` answers for the groups of this run.

    Raises:
        ConfigError: something that only shows now does not fit (device, ops, size of the data).
        DamagedInputError: a tokenizer or data file is missing or damaged.
    """
    pin_arithmetic(config.numerics)
    tokenizer = tokenizer_from(config.tokenizer)
    config = resolve_vocabulary(config, tokenizer.vocab_size)
    asked = config.distributed
    device = pick_device(asked.distributed_backend, launch)
    ops = build_table(ALL_OPS, config.numerics, device, params_dtype(config), config.model.kv_channels)
    backend = start_process_group(launch, asked.distributed_backend, device, asked.distributed_timeout_minutes)
    layout = logical_layout(config)
    placement = Placement(nodes=gather_nodes(host_name()), block=layout.block, expert_block=layout.expert_block)
    topology = topology_of(config, launch.world_size)
    groups = create_process_groups(topology, device, placement, asked.distributed_timeout_minutes)
    set_process_groups(groups)
    return assemble_run(config, tokenizer, ops, groups, launch, backend if launch.world_size > 1 else "none")


def params_dtype(config: RunConfig) -> torch.dtype:
    """Type of working weights and activations."""
    return torch.bfloat16 if config.model.bf16 else torch.float32


def assemble_run(
    config: RunConfig, tokenizer: Tokenizer, ops: OpTable, groups: ProcessGroups, launch: Launch, backend: str
) -> Run:
    """Data, model, engine and step on process groups that exist. Raises as ``build_run``."""
    seed_generators(config.training.seed, groups.at)
    splits = build_datasets(
        config.data,
        tokenizer,
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        sizes=_split_sizes(config),
        turn="run" if launch.rank == 0 else "machine" if launch.local_rank == 0 else "others",
        meet=lambda wrong: first_of_ranks(groups, wrong),
        trains=not config.training.skip_train,
    )
    tracing = Tracing(config.trace, groups) if config.trace.trace_dir else None
    interval = config.training.replay_check_interval
    replay = None if interval is None else ReplayCheck(interval, ops)
    if tracing is not None:
        groups, ops = tracing.groups(), tracing.ops(ops)
    if replay is not None:
        groups = replay.groups(groups)
    sums = _float_sums(config, ops)
    context = ModelContext(
        groups=groups,
        sums=sums if tracing is None else tracing.sums(sums),
        ops=ops,
        seed=config.training.seed,
        params_dtype=params_dtype(config),
        sequence_parallel=config.parallel.sequence_parallel,
        layout=logical_layout(config),
    )
    chunks = build_hybrid_chunks(config.model, context, tokenizer.vocab_size)
    step = _train_step(config, chunks, context, _eval_shape(config, context.layout.ldp, splits))
    if replay is not None:
        replay.attach(step, None if tracing is None else tracing.recorder)
    return Run(
        config=config,
        launch=launch,
        groups=groups,
        backend=backend,
        layout=context.layout,
        ops=ops,
        chunks=chunks,
        step=step if tracing is None else tracing.step(step),
        splits=splits,
        data_digest=agreed_digest(splits, groups),
        tracing=tracing,
    )


def first_of_ranks(groups: ProcessGroups, wrong: str | None) -> str | None:
    """What is wrong on the first rank that says so, with its number; collective."""
    said = gather_objects(groups.world, wrong)
    return next((f"rank {rank}: {words}" for rank, words in enumerate(said) if words is not None), None)


def agreed_digest(splits: Splits, groups: ProcessGroups) -> str:
    """The digest of the data, the same on every rank; collective.

    Raises:
        DamagedInputError: machines hold different data under the same paths.
    """
    mine = data_digest(splits), source_digests(splits)
    found = cast(list[tuple[str, list[tuple[str, str]]]], gather_objects(groups.world, mine))
    others = [rank for rank, (digest, _) in enumerate(found) if digest != found[0][0]]
    if others:
        (_, theirs), (_, first) = found[others[0]], found[0]
        names = [name for (name, content), (_, known) in zip(theirs, first, strict=False) if content != known]
        what = f"copies that differ: {', '.join(names)}" if names else "indices that differ"
        raise DamagedInputError(
            f"the data of rank {others[0]} are not those of rank 0: {what} (ranks {', '.join(map(str, others))})"
        )
    return found[0][0]


def _float_sums(config: RunConfig, ops: OpTable) -> FloatSums:
    """Ordered sums, unless the fastest of everything was asked for as the baseline of a cost comparison."""
    return NativeSums() if config.numerics.native_sums else OrderedSums(ops["blocked_fold"])


def _split_sizes(config: RunConfig) -> tuple[int, int | None, int]:
    training = config.training
    return requested_sizes(
        train_samples=training.train_samples,
        train_iters=training.train_iters,
        eval_iters=training.eval_iters,
        eval_interval=training.eval_interval,
        global_batch_size=training.global_batch_size,
        start_eval_at_iter=training.start_eval_at_iter,
        eval_global_batch_size=training.eval_global_batch_size,
        full_validation=training.full_validation,
    )


def _eval_shape(config: RunConfig, shards: int, splits: Splits) -> EvalShape:
    """Sizes of an evaluation.

    Raises:
        ConfigError: evaluations are asked for, and there is nothing to evaluate on.
    """
    training = config.training
    size, micro = eval_batch_sizes(training)
    assert size is not None and micro is not None
    asked = training.full_validation or training.eval_iters
    if training.eval_interval and asked and splits.valid is None:
        if not training.skip_train or training.full_validation:
            flag = "--full-validation" if training.full_validation else f"--eval-interval {training.eval_interval}"
            given = f"{flag} without validation data ({splits.absent['valid'].reason})"
            change = "--split or --valid-data-path, or leave the flag out"
            raise ConfigError([Problem(given, "validation data", change)])
        if splits.test is None:
            reasons = " and ".join(f"{name} data ({splits.absent[name].reason})" for name in ("valid", "test"))
            change = "--split, --valid-data-path or --test-data-path, or leave out --skip-train"
            raise ConfigError([Problem(f"--skip-train without {reasons}", "data to evaluate on", change)])
    if not training.full_validation:
        return EvalShape(batches=training.eval_iters, batch_size=size, stride=shards * micro, micro_batch_size=micro)
    assert splits.valid is not None, "--full-validation needs --eval-interval"
    return plan_full_validation(len(splits.valid), shards=shards, at_most=size)


def reported_layers(config: RunConfig) -> ReportedLayers:
    """The per-layer values that the stages' reports hold."""
    pattern = pattern_of(config.model)
    blocks = pattern.mtp[:1] if config.model.mtp_use_repeated_layer else pattern.mtp
    moe = tuple(i for i, symbol in enumerate(pattern.layers + "".join(blocks)) if symbol == MOE)
    return ReportedLayers(names=config.model.auxiliary_names if moe else (), layers=moe, depths=len(pattern.mtp))


def _train_step(config: RunConfig, chunks: Sequence[Stage], context: ModelContext, evaluation: EvalShape) -> TrainStep:
    training, groups = config.training, context.groups
    buckets = config.ddp
    if config.trace.trace_dir or groups.dp.probe is not None:
        # A probe sees what arrived, where the plan puts it; every rank does the same, traced itself or not.
        buckets = replace(buckets, overlap_grad_reduce=False, overlap_param_gather=False)
    ddp = DistributedDataParallel(chunks, buckets, groups=groups, sums=context.sums, layout=context.layout)
    optimizer = Optimizer(
        ddp.buffers, config.optimizer, groups=groups, ops=context.ops, seed=training.seed, gather=ddp.gather_weights
    )
    shape = StepShape(
        shards=context.layout.shards_of(groups.dp.rank, groups.dp.size),
        batch_sizes=known_batch_sizes(config),
        stride=context.layout.ldp * training.micro_batch_size,
        micro_batch_size=training.micro_batch_size,
        seq_length=config.model.seq_length,
        reported=reported_layers(config),
        evaluation=evaluation,
        stop_on_non_finite=training.check_for_nan_in_loss_and_grad,
        count_zeros=config.logging.log_num_zeros_in_grad,
        norm_params=config.logging.log_params_norm,
        per_token=config.model.calculate_per_token_loss,
        watch_replicas=training.check_weight_hash_across_dp_replicas_interval,
        overlap_p2p=config.parallel.overlap_p2p_communication,
    )
    return TrainStep(chunks, ddp, optimizer, schedule_of(config), groups, shape)
