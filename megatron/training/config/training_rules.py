"""Rules about the length of training, the schedule, the watches and the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import ConfigError, Problem
from megatron.training.config.resolve import eval_batch_sizes, resolve_vocabulary, vocabulary_without_files
from megatron.training.config.run import RunConfig


def training_problems(given: RunConfig, config: RunConfig) -> list[Problem]:
    """Everything about length and schedule that cannot work. ``given`` is the configuration before ``resolve``."""
    return [
        *_length_problems(given, config),
        *_batch_problems(given),
        *_evaluation_problems(given),
        *_evaluation_batch_problems(config),
        *_unit_problems(given),
        *_schedule_problems(given, config),
        *_weight_decay_problems(given),
        *_optimizer_problems(config),
        *_replay_problems(config),
        *_vocabulary_problems(config),
        *given.checkpoint.problems(),
        *given.distributed.problems(),
    ]


def _replay_problems(config: RunConfig) -> Iterator[Problem]:
    if config.training.replay_check_interval is not None and not config.numerics.deterministic_mode:
        yield Problem(
            f"--replay-check-interval {config.training.replay_check_interval} without --deterministic-mode",
            "steps that give the same bits when they are computed twice",
            "add --deterministic-mode, or leave out --replay-check-interval",
        )


def _length_problems(given: RunConfig, config: RunConfig) -> Iterator[Problem]:
    iterations, samples = given.training.train_iters, given.training.train_samples
    if (iterations is None) == (samples is None):
        twice = f"--train-iters {iterations} and --train-samples {samples}"
        yield Problem(
            twice if iterations is not None else "neither --train-iters nor --train-samples",
            "the length of training, once",
            "leave out one of them" if iterations is not None else "add --train-iters or --train-samples",
        )
    elif config.training.train_iters == 0:
        yield Problem(
            f"--train-samples {samples} with --global-batch-size {config.training.global_batch_size}",
            "samples for at least one iteration",
            "--train-samples or --global-batch-size",
        )


def _batch_problems(given: RunConfig) -> Iterator[Problem]:
    """Batch sizes that change are counted in samples and said once."""
    training = given.training
    changing = {
        "--step-batch-size-schedule": training.step_batch_size_schedule,
        "--rampup-batch-size": training.rampup_batch_size,
    }
    flags = [flag for flag, value in changing.items() if value is not None]
    if len(flags) > 1:
        yield Problem(" and ".join(flags), "one of the two", f"leave out {flags[1]}")
    for flag in flags:
        if training.train_samples is None and training.train_iters is not None:
            counted = f"{flag} in a run counted by --train-iters {training.train_iters}"
            yield Problem(counted, "a length in samples", "--train-iters to --train-samples")
    if training.step_batch_size_schedule is not None and training.global_batch_size is not None:
        both = f"--step-batch-size-schedule and --global-batch-size {training.global_batch_size}"
        yield Problem(both, "one of the two", "leave out --global-batch-size")
    if training.rampup_batch_size is not None and training.global_batch_size is None:
        yield Problem("--rampup-batch-size alone", "the size it leads to", "add --global-batch-size")


def _evaluation_problems(given: RunConfig) -> Iterator[Problem]:
    training = given.training
    if training.eval_interval is None:
        for flag, used in {
            "--skip-train": training.skip_train,
            f"--start-eval-at-iter {training.start_eval_at_iter}": training.start_eval_at_iter is not None,
            "--full-validation": training.full_validation,
        }.items():
            if used:
                yield Problem(f"{flag} without --eval-interval", "evaluation to be on", "add --eval-interval")
    elif training.skip_train and training.eval_iters == 0 and not training.full_validation:
        yield Problem("--skip-train with --eval-iters 0", "something to do", "--eval-iters")


def _evaluation_batch_problems(config: RunConfig) -> Iterator[Problem]:
    """Batches of an evaluation are cut into micro-batches as those of training are."""
    training, shards = config.training, config.parallel.logical_data_parallel_size
    size, micro = eval_batch_sizes(training)
    if size is None or micro is None or shards is None or size % (micro * shards) == 0:
        return
    if training.eval_global_batch_size is None and training.eval_micro_batch_size is None:
        return
    yield Problem(
        f"an evaluation's batch of {size} sequences with {micro} a forward pass and {shards} logical shards",
        f"a multiple of {micro} * {shards} = {micro * shards}",
        "--eval-global-batch-size or --eval-micro-batch-size",
    )


def _unit_problems(given: RunConfig) -> Iterator[Problem]:
    """A run is counted in iterations or in samples, not in both."""
    scheduler = given.scheduler
    in_samples = given.training.train_samples is not None
    if in_samples and given.training.train_iters is not None:
        return
    wrong = {
        "lr_decay": scheduler.lr_decay_iters if in_samples else scheduler.lr_decay_samples,
        "lr_warmup": scheduler.lr_warmup_iters if in_samples else scheduler.lr_warmup_samples,
        "lr_wsd_decay": scheduler.lr_wsd_decay_iters if in_samples else scheduler.lr_wsd_decay_samples,
    }
    mine, other = ("samples", "iters") if in_samples else ("iters", "samples")
    for name, value in wrong.items():
        if value:
            stem = "--" + name.replace("_", "-")
            yield Problem(
                f"{stem}-{other} {value} in a run counted by --train-{mine}",
                f"{stem}-{mine}",
                f"{stem}-{mine}, or --train-{other}",
            )


def _schedule_problems(given: RunConfig, config: RunConfig) -> Iterator[Problem]:
    scheduler, lr = config.scheduler, config.optimizer.lr
    if lr is not None and config.optimizer.min_lr > lr:
        yield Problem(
            f"--min-lr {config.optimizer.min_lr} with --lr {lr}", f"at most the peak, {lr}", "--min-lr or --lr"
        )
    if lr is not None and scheduler.lr_warmup_init > lr:
        yield Problem(
            f"--lr-warmup-init {scheduler.lr_warmup_init} with --lr {lr}",
            f"at most the peak, {lr}",
            "--lr-warmup-init or --lr",
        )
    warmups = given.scheduler.lr_warmup_iters or given.scheduler.lr_warmup_samples
    if given.scheduler.lr_warmup_fraction is not None and warmups:
        yield Problem(
            f"--lr-warmup-fraction {scheduler.lr_warmup_fraction} and a warm-up of {warmups} iterations or samples",
            "the length of the warm-up, once",
            "leave out one of them",
        )
    decay, warmup, last = scheduler.lr_decay_samples, scheduler.lr_warmup_samples, scheduler.lr_wsd_decay_samples
    if decay is not None and warmup >= decay:
        yield Problem(
            f"a warm-up of {warmup} samples with a decay that ends at {decay} samples (the length of training unless "
            "given)",
            f"a warm-up shorter than {decay} samples",
            "--lr-warmup-iters, --lr-warmup-samples, or --lr-decay-iters, --lr-decay-samples",
        )
    if scheduler.lr_decay_style == "WSD" and last is None:
        yield Problem(
            "--lr-decay-style WSD without the length of its last phase",
            "--lr-wsd-decay-iters or --lr-wsd-decay-samples",
            "add one of them",
        )
    elif scheduler.lr_decay_style == "WSD" and decay is not None and last is not None and last > decay:
        yield Problem(
            f"a last phase of WSD of {last} samples with a decay that ends at {decay} samples",
            f"at most {decay} samples",
            "--lr-wsd-decay-iters, --lr-wsd-decay-samples",
        )


def _weight_decay_problems(given: RunConfig) -> Iterator[Problem]:
    scheduler = given.scheduler
    ends = (scheduler.start_weight_decay, scheduler.end_weight_decay)
    style = scheduler.weight_decay_incr_style
    if style == "constant" and ends != (None, None):
        yield Problem(
            f"--start-weight-decay {ends[0]}, --end-weight-decay {ends[1]} with --weight-decay-incr-style constant",
            "a style that goes from one to the other, or --weight-decay alone",
            "--weight-decay-incr-style linear or cosine",
        )
    if style != "constant" and None in ends:
        yield Problem(
            f"--weight-decay-incr-style {style} without both ends",
            "--start-weight-decay and --end-weight-decay",
            "add what is missing",
        )


def _optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    ddp = config.ddp
    if ddp.ddp_bucket_size is not None and ddp.ddp_num_buckets is not None:
        yield Problem(
            f"--ddp-bucket-size {ddp.ddp_bucket_size} and --ddp-num-buckets {ddp.ddp_num_buckets}",
            "one statement about buckets",
            "leave out one of the two",
        )


def _vocabulary_problems(config: RunConfig) -> list[Problem]:
    found = [*config.data.problems(), *config.tokenizer.problems()]
    vocabulary = vocabulary_without_files(config.tokenizer)
    tp = config.parallel.tensor_model_parallel_size
    if found or vocabulary is None or vocabulary < 1 or tp < 1:
        return found
    try:
        resolve_vocabulary(config, vocabulary)
    except ConfigError as error:
        return list(error.problems)
    return []
