"""Batch sizes, length of training, evaluation, watches and exits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.errors import Problem
from megatron.core.config.fields import operational, trajectory


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop."""

    micro_batch_size: int | None = trajectory(None)
    """Sequences per rank in one forward pass."""
    global_batch_size: int | None = trajectory(None)
    """Sequences per optimizer step; default: micro-batch size * logical data-parallel size."""
    step_batch_size_schedule: str | None = trajectory(None)
    """Global batch size by the tokens trained on: "0:768 250B:1536", with K, M, B or T for powers of a thousand.
    Instead of --global-batch-size; needs --train-samples."""
    rampup_batch_size: tuple[int, ...] | None = trajectory(None)
    """START INCREMENT SAMPLES: grow the global batch size from START to --global-batch-size by INCREMENT, in equal
    parts of the first SAMPLES samples; needs --train-samples."""
    train_iters: int | None = trajectory(None)
    """Optimizer steps to run."""
    train_samples: int | None = trajectory(None)
    """Samples to run, instead of iterations."""
    seed: int = trajectory(1234)
    """Seed of initial values, data order and all noise; above 0."""
    eval_iters: int = trajectory(100)
    """Batches per evaluation; with 0 nothing is evaluated, but the validation data of --full-validation."""
    eval_interval: int | None = trajectory(None)
    """Iterations between evaluations on the validation data; one more on the test data follows the last iteration,
    whatever else stops the run there. None when not given."""
    start_eval_at_iter: int | None = trajectory(None)
    """First iteration that may be evaluated after; the first multiple of --eval-interval when not given."""
    eval_global_batch_size: int | None = trajectory(None)
    """Sequences per batch of an evaluation; those of --global-batch-size when not given."""
    eval_micro_batch_size: int | None = trajectory(None)
    """Sequences per rank in one forward pass of an evaluation; those of --micro-batch-size when not given."""
    full_validation: bool = trajectory(False)
    """Evaluate on the whole validation data, once through each time, one sequence per forward pass, instead of
    --eval-iters batches."""
    skip_train: bool = operational(False)
    """Train nothing: evaluate the weights of --load once, and stop. Training data need not be named."""
    manual_gc: bool = operational(False)
    """Collect garbage of Python at fixed iterations, the same on every rank, instead of when it thinks best."""
    manual_gc_interval: int = operational(0)
    """Iterations between collections with --manual-gc; 0: only at the start and around evaluations."""
    manual_gc_eval: bool = operational(True, flags=("--no-manual-gc-eval",), negates=True)
    """Collections before and after each evaluation, with --manual-gc."""
    exit_interval: int | None = operational(None)
    """Stop after an iteration that this number divides, saving first where --save is given."""
    exit_duration_in_mins: int | None = operational(None)
    """Stop after this many minutes."""
    exit_signal_handler: bool = operational(False)
    """On --exit-signal finish the step, save where --save is given, and end with exit code 0."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = operational("SIGTERM")
    """The signal that --exit-signal-handler waits for."""
    check_for_nan_in_loss_and_grad: bool = operational(True)
    """Stopping every rank when a loss is not finite, naming where (exit code 4). A gradient that is not finite stops
    them in any case."""
    check_weight_hash_across_dp_replicas_interval: int | None = operational(None)
    """Iterations between comparisons of weights, and of optimizer state that is not cut, over data-parallel ranks; a
    difference stops every rank, naming rank and tensor (exit code 4). None when not given."""
    replay_check_interval: int | None = operational(None)
    """Iterations between steps that are computed twice from the same state and compared before they are taken; a
    difference (silent data corruption) stops every rank, naming rank and tensor (exit code 4). Needs
    --deterministic-mode. None when not given."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Process groups and devices."""

    distributed_backend: Literal["nccl", "gloo"] | None = operational(None)
    """nccl or gloo; default: nccl where there is a GPU, else gloo."""
    distributed_timeout_minutes: int = operational(10)
    """Longest wait in a collective before the run is stopped."""
    dry_run: bool = operational(False)
    """Check everything, print parameter counts and what a rank of each pipeline stage needs, and stop; nothing is
    started or written."""
    dry_run_world_size: int | None = operational(None)
    """Processes to plan for with --dry-run; default: those of this launch."""

    def problems(self) -> list[Problem]:
        """Settings here that contradict each other."""
        if self.dry_run_world_size is None or self.dry_run:
            return []
        given = f"--dry-run-world-size {self.dry_run_world_size} without --dry-run"
        return [Problem(given, "a plan to make", "add --dry-run, or leave it out")]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard and the run folder."""

    log_interval: int = operational(100)
    """Iterations between log lines; the first one of a launch is always logged."""
    log_throughput: bool = operational(False)
    """Add TFLOP/s per GPU to the log line."""
    log_params_norm: bool = operational(False)
    """Add the norm of the weights to the log line."""
    log_num_zeros_in_grad: bool = operational(False)
    """Add the number of zero gradient elements to the log line."""
    tensorboard_dir: str | None = operational(None)
    """Folder for TensorBoard events; none when not given."""
    tensorboard_log_interval: int = operational(1)
    """Iterations between TensorBoard points."""
    run_dir: str | None = operational(None)
    """Folder for metrics.jsonl, manifest.json and curves.png of this run; none when not given. What an earlier run has
    there and this one does not go on with moves to earlier_1, or the next number."""


@dataclass(frozen=True, kw_only=True)
class FingerprintConfig:
    """One line of digests a step, to compare runs by."""

    fingerprint_dir: str | None = operational(None)
    """Folder for manifest.json, fingerprint.jsonl and one file per rank; none when not given."""
    fingerprint_interval: int = operational(1)
    """Iterations between lines."""
    fingerprint_level: Literal["metrics", "state"] = operational("state")
    """metrics: losses, norm and learning rate; state: also digests of weights, masters, moments, data and keys."""
