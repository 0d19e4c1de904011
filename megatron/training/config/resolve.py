"""Fills what the user left out. Pure: the same settings and number of processes give the same ``RunConfig`` everywhere.

``resolve`` never refuses: where a value cannot be derived it stays ``None`` and ``validate`` says why. After both these
settings may still be ``None``, which then means:

* ``embedding_init_method_std``: embeddings are drawn like the other weights and decay;
* ``moe_router_dtype``: the activations' type; ``moe_router_topk_scaling_factor``: no factor; ``moe_input_jitter_eps``:
  no jitter; ``moe_shared_expert_intermediate_size``: no shared experts; ``moe_latent_size``: experts at the residual
  stream's width; ``moe_router_num_groups`` and ``moe_router_group_topk``: all experts are one group;
  ``moe_expert_capacity_factor``: no limit; ``moe_z_loss_coeff``: no such loss; ``num_moe_experts`` and
  ``moe_ffn_hidden_size``: no experts; ``num_attention_heads`` and ``kv_channels``: no attention layers;
* ``recompute_granularity`` and what belongs to it: all activations are kept;
* ``mtp_hybrid_override_pattern``: its layers are / parts of the pattern;
* ``ddp_bucket_size``: set by ``ddp_num_buckets`` once the parameters are known;
* ``padded_vocab_size`` until ``resolve_vocabulary`` has seen the tokenizer;
* ``distributed_backend`` until a device is known; ``dry_run_world_size``: the processes of the launch;
* ``step_batch_size_schedule`` and ``rampup_batch_size``: one batch size; ``start_eval_at_iter``: from the start;
* ``eval_global_batch_size`` and ``eval_micro_batch_size``: those of training;
* ``start_weight_decay`` and ``end_weight_decay``: ``weight_decay`` throughout;
* files, folders and intervals that switch something on.

Of the schedule only the fields counted in samples are read after ``resolve``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.optimizer import DistributedDataParallelConfig, SchedulerConfig, default_bucket_size
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.config.transformer import TransformerConfig
from megatron.core.datasets.batch_sizes import BatchSizes, parse_schedule, ramp_up
from megatron.core.datasets.splits import DEFAULT_SPLIT
from megatron.core.models.hybrid.hybrid_layer_allocation import HybridPattern, parse_pattern, pattern_problems
from megatron.core.optimizer.optimizer_param_scheduler import Schedule, plan_schedule
from megatron.core.process_groups.topology import LogicalLayout, Topology, default_block, plan_topology
from megatron.core.tokenizers.byte import ByteTokenizer
from megatron.core.tokenizers.tiktoken import DEFAULT_VOCAB_SIZE
from megatron.training.config.data import DataConfig, TokenizerConfig, padded_vocabulary
from megatron.training.config.run import RunConfig
from megatron.training.config.training import TrainingConfig


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """Settings as given -> settings in effect, for ``world_size`` processes."""
    parallel = _parallel(config.parallel, world_size)
    training = _training(config.training, parallel, config.model.seq_length)
    return replace(
        config,
        model=_model(config.model),
        parallel=parallel,
        training=training,
        scheduler=_scheduler(config.scheduler, training),
        ddp=_ddp(config.ddp, data_parallel_size(config.parallel, world_size)),
        data=_data(config.data),
    )


def resolve_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Fill the number of embedding rows from the tokenizer's vocabulary.

    Raises:
        ConfigError: the stated number of rows is too small, or tensor parallelism does not divide it.
    """
    rows = padded_vocabulary(config.tokenizer, vocab_size, config.parallel.tensor_model_parallel_size)
    return replace(config, tokenizer=replace(config.tokenizer, padded_vocab_size=rows))


def vocabulary_without_files(config: TokenizerConfig) -> int | None:
    """The vocabulary where it does not take a file to say it; ``None`` where it does."""
    if config.tokenizer_type == "NullTokenizer":
        return config.vocab_size
    if config.tokenizer_type == "ByteTokenizer":
        return config.vocab_size or ByteTokenizer.vocab_size
    if config.tokenizer_type == "TikTokenizer":
        return config.vocab_size or DEFAULT_VOCAB_SIZE
    return None


def schedule_of(config: RunConfig) -> Schedule:
    """Learning rate and weight decay of a resolved and validated configuration."""
    samples = _known(config.training.train_samples, "--train-samples")
    return plan_schedule(config.scheduler, config.optimizer, train_samples=samples)


def topology_of(config: RunConfig, world_size: int) -> Topology:
    """The ranks' layout of a resolved configuration.

    Raises:
        ConfigError: the sizes do not divide.
    """
    parallel = config.parallel
    return plan_topology(
        world=world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
    )


def logical_layout(config: RunConfig) -> LogicalLayout:
    """The logical layout of a resolved configuration whose vocabulary is known too."""
    parallel, tokenizer, training = config.parallel, config.tokenizer, config.training
    return LogicalLayout(
        ldp=_known(parallel.logical_data_parallel_size, "logical_data_parallel_size"),
        block=_known(parallel.logical_reduce_block_size, "logical_reduce_block_size"),
        tp=parallel.tensor_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=_known(parallel.expert_tensor_parallel_size, "expert_tensor_parallel_size"),
        padded_vocab_size=_known(tokenizer.padded_vocab_size, "padded_vocab_size"),
        micro_batch_size=_known(training.micro_batch_size, "micro_batch_size"),
    )


def known_logical_layout(config: RunConfig) -> dict[str, int]:
    """The fields of the logical layout that a resolved configuration knows before the tokenizer is read."""
    parallel, vocabulary = config.parallel, vocabulary_without_files(config.tokenizer)
    layout = {
        "ldp": parallel.logical_data_parallel_size,
        "block": parallel.logical_reduce_block_size,
        "tp": parallel.tensor_model_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
        "padded_vocab_size": None,
        "micro_batch_size": config.training.micro_batch_size,
    }
    if vocabulary is not None:
        layout["padded_vocab_size"] = resolve_vocabulary(config, vocabulary).tokenizer.padded_vocab_size
    return {name: size for name, size in layout.items() if size is not None}


def batch_sizes(training: TrainingConfig, sequence_length: int | None) -> BatchSizes | None:
    """The global batch size by consumed samples; ``None`` where it is not known.

    Raises:
        ValueError: the schedule or the ramp-up is not of its form.
    """
    size, ramp = training.global_batch_size, training.rampup_batch_size
    if training.step_batch_size_schedule is not None:
        return parse_schedule(training.step_batch_size_schedule, sequence_length) if sequence_length else None
    if size is None or size < 1:
        return None
    if ramp is None:
        return BatchSizes(((0, size),))
    if len(ramp) != 3:
        raise ValueError(f"{len(ramp)} numbers instead of START INCREMENT SAMPLES")
    return ramp_up(*ramp, size)


def known_batch_sizes(config: RunConfig) -> BatchSizes:
    """The same of a resolved and validated configuration."""
    sizes = batch_sizes(config.training, config.model.seq_length)
    if sizes is None:
        raise ValueError("the global batch size is not known: resolve and validate the configuration first")
    return sizes


def eval_batch_sizes(training: TrainingConfig) -> tuple[int | None, int | None]:
    """Sequences of a global batch and of a forward pass of an evaluation, as far as they are known."""
    micro = 1 if training.full_validation else training.eval_micro_batch_size or training.micro_batch_size
    return training.eval_global_batch_size or training.global_batch_size, micro


def num_microbatches(config: RunConfig) -> int:
    """Micro-batches of each logical shard in an optimizer step at the end of a resolved configuration."""
    samples = _known(config.training.micro_batch_size, "micro_batch_size")
    shards = _known(config.parallel.logical_data_parallel_size, "logical_data_parallel_size")
    return _known(config.training.global_batch_size, "global_batch_size") // (samples * shards)


def pattern_of(model: TransformerConfig) -> HybridPattern | None:
    """The parsed pattern, or ``None`` where there is none or it cannot be parsed."""
    if model.hybrid_layer_pattern is None or pattern_problems(model.hybrid_layer_pattern):
        return None
    return parse_pattern(model.hybrid_layer_pattern)


def resolution_notes(given: RunConfig, resolved: RunConfig) -> list[str]:
    """What has no effect although it was given, or is missing for a run, one sentence each."""
    notes = []
    before, after = given.model.num_layers, resolved.model.num_layers
    if before is not None and before != after:
        notes.append(f"--num-layers {before} has no effect: the pattern has {after} layers")
    before, after = given.model.mtp_num_layers, resolved.model.prediction_depths
    if before is not None and before != after:
        notes.append(f"--mtp-num-layers {before} has no effect: the pattern has {after} / parts")
    if not given.data.given_sources():
        notes.append("no data named: a run needs --data-path or --mock-data, a dry run does not")
    if given.training.full_validation and given.training.eval_micro_batch_size is not None:
        notes.append("--eval-micro-batch-size has no effect: --full-validation takes one sequence per forward pass")
    return notes


def _known(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{name} is not known: resolve and validate the configuration first")
    return value


def _model(model: TransformerConfig) -> TransformerConfig:
    changes: dict[str, object] = {}
    hidden, heads = model.hidden_size, model.num_attention_heads
    model = _with_depths(model)
    pattern = pattern_of(model)
    if pattern is not None:
        changes["num_layers"] = pattern.num_layers
        if pattern.mtp or model.mtp_num_layers is None:
            changes["mtp_num_layers"] = len(pattern.mtp)
    if model.kv_channels is None and hidden and heads and heads > 0 and hidden % heads == 0:
        changes["kv_channels"] = hidden // heads
    ffn = model.ffn_hidden_size
    if ffn is None and hidden is not None:
        # Megatron: two thirds of 4h so that SwiGLU's three matrices weigh as much as two, in steps of 64.
        ffn = hidden * 8 // 3 // 64 * 64 if model.swiglu else 4 * hidden
        changes["ffn_hidden_size"] = ffn
    if model.mamba_num_heads is None and hidden and model.mamba_head_dim > 0 and 2 * hidden % model.mamba_head_dim == 0:
        changes["mamba_num_heads"] = 2 * hidden // model.mamba_head_dim
    if model.num_moe_experts == 0:
        changes["num_moe_experts"] = None
    elif model.num_moe_experts is not None and model.moe_ffn_hidden_size is None:
        changes["moe_ffn_hidden_size"] = ffn
    if model.moe_expert_capacity_factor is not None and model.moe_expert_capacity_factor < 0:
        changes["moe_expert_capacity_factor"] = None
    if model.recompute_granularity == "selective" and model.recompute_modules is None:
        changes["recompute_modules"] = ("core_attn",)
    if model.max_position_embeddings is None:
        changes["max_position_embeddings"] = model.seq_length
    return replace(model, **changes)  # type: ignore[arg-type]


def _with_depths(model: TransformerConfig) -> TransformerConfig:
    """Megatron's older spelling of the depths of multi-token prediction, written as / parts of the pattern. A pattern
    that has such parts says it all."""
    part, main = model.mtp_hybrid_override_pattern, model.hybrid_layer_pattern
    if not part or main is None:
        return model
    if "/" not in main and model.mtp_num_layers is not None:
        main += f"/{part}" * model.mtp_num_layers
    return replace(model, hybrid_layer_pattern=main, mtp_hybrid_override_pattern=None)


def data_parallel_size(parallel: ModelParallelConfig, world_size: int) -> int | None:
    """Ranks that hold the same dense weights; ``None`` where the sizes do not divide."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return world_size // (tp * pp) if tp > 0 and pp > 0 and world_size % (tp * pp) == 0 else None


def _parallel(parallel: ModelParallelConfig, world_size: int) -> ModelParallelConfig:
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    ldp, block = parallel.logical_data_parallel_size, parallel.logical_reduce_block_size
    if ldp is None:
        ldp = data_parallel_size(parallel, world_size)
    if block is None and ldp is not None and tp > 0:
        block = default_block(ldp, tp)
    return replace(
        parallel,
        expert_tensor_parallel_size=tp if etp is None else etp,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        logical_data_parallel_size=ldp,
        logical_reduce_block_size=block,
    )


def _training(training: TrainingConfig, parallel: ModelParallelConfig, sequence_length: int | None) -> TrainingConfig:
    ldp = parallel.logical_data_parallel_size
    try:
        sizes = batch_sizes(training, sequence_length)
    except ValueError:  # said by validate
        return training
    if training.step_batch_size_schedule is not None and sizes is not None:
        training = replace(training, global_batch_size=sizes.last)
    elif sizes is None and training.micro_batch_size is not None and ldp is not None:
        sizes = BatchSizes(((0, training.micro_batch_size * ldp),))
        training = replace(training, global_batch_size=sizes.last)
    if sizes is None or sizes.last < 1:
        return training
    if training.train_iters is None and training.train_samples is not None:
        return replace(training, train_iters=sizes.iterations(training.train_samples))
    if training.train_iters is not None and training.train_samples is None:
        return replace(training, train_samples=sizes.after(0, training.train_iters))
    return training


def _scheduler(scheduler: SchedulerConfig, training: TrainingConfig) -> SchedulerConfig:
    changes: dict[str, object] = {}
    decay = _in_samples(scheduler.lr_decay_samples, scheduler.lr_decay_iters, training)
    decay = training.train_samples if decay is None else decay
    changes["lr_decay_samples"] = decay
    changes["lr_wsd_decay_samples"] = _in_samples(
        scheduler.lr_wsd_decay_samples, scheduler.lr_wsd_decay_iters, training
    )
    if scheduler.lr_warmup_fraction is not None and decay is not None:
        changes["lr_warmup_samples"] = round(scheduler.lr_warmup_fraction * decay)
    elif scheduler.lr_warmup_iters:
        changes["lr_warmup_samples"] = _in_samples(
            scheduler.lr_warmup_samples or None, scheduler.lr_warmup_iters, training
        )
    return replace(scheduler, **changes)  # type: ignore[arg-type]


def _in_samples(samples: int | None, iterations: int | None, training: TrainingConfig) -> int | None:
    """A length in samples, from whichever count was given."""
    if samples is not None or iterations is None or training.global_batch_size is None:
        return samples
    return iterations * training.global_batch_size


def _ddp(ddp: DistributedDataParallelConfig, data_parallel_size: int | None) -> DistributedDataParallelConfig:
    if ddp.ddp_bucket_size is not None or ddp.ddp_num_buckets is not None or data_parallel_size is None:
        return ddp
    return replace(ddp, ddp_bucket_size=default_bucket_size(data_parallel_size))


def _data(data: DataConfig) -> DataConfig:
    from_one_source = data.data_path is not None or data.data_args_path is not None
    split = DEFAULT_SPLIT if data.split is None and from_one_source else data.split
    return replace(data, split=split)
