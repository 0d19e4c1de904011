"""Optimizer, schedule and gradient reduction settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.fields import layout, trajectory


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and clipping."""

    optimizer: Literal["adam", "sgd"] = trajectory("adam")
    """adam: Adam with decoupled weight decay; sgd: momentum, with the weight decay as part of the gradient."""
    sgd_momentum: float = trajectory(0.9)
    """With sgd: what the running update keeps of itself."""
    lr: float | None = trajectory(None)
    """Peak learning rate."""
    min_lr: float = trajectory(0.0)
    """Learning rate at the end of the decay."""
    adam_beta1: float = trajectory(0.9)
    """Decay rate of the first moment."""
    adam_beta2: float = trajectory(0.999)
    """Decay rate of the second moment."""
    adam_eps: float = trajectory(1e-8)
    """Added to the root of the second moment."""
    weight_decay: float = trajectory(0.01)
    """Weight decay on matrices; biases and vectors do not decay."""
    clip_grad: float = trajectory(1.0)
    """Largest global L2 norm of the gradient; 0 switches clipping off."""
    use_distributed_optimizer: bool = layout(False)
    """Cut masters and moments over the data-parallel ranks."""


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements per gradient bucket where nothing is said, as in Megatron."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Gradient buckets."""

    grad_reduce_in_bf16: bool = trajectory(False)
    """Round each logical shard's gradient to bfloat16, once, before the shards are added, which stays in fp32."""
    ddp_bucket_size: int | None = layout(None)
    """Elements per gradient bucket; default: max(40,000,000, 1,000,000 * DP)."""
    ddp_num_buckets: int | None = layout(None)
    """Cut the gradients into about this many buckets instead of giving a size."""
    overlap_grad_reduce: bool = layout(False)
    """Send each bucket of gradients as soon as it is complete, beside the rest of the backward. A run that is traced or
    checked by replay does one after the other; no bit depends on it."""
    overlap_param_gather: bool = layout(False)
    """Gather the new weights bucket by bucket beside the next forward, which waits for what it uses; needs
    --use-distributed-optimizer and --overlap-grad-reduce."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning-rate schedule, counted in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = trajectory("linear")
    """Shape of the decay."""
    lr_decay_iters: int | None = trajectory(None)
    """Iterations until the decay ends; default: all of the training."""
    lr_decay_samples: int | None = trajectory(None)
    """Samples until the decay ends, for runs counted in samples."""
    lr_warmup_fraction: float | None = trajectory(None)
    """Share of the decay length spent warming up."""
    lr_warmup_iters: int = trajectory(0)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = trajectory(0)
    """Samples of linear warm-up, for runs counted in samples."""
    lr_warmup_init: float = trajectory(0.0)
    """Learning rate the warm-up starts from."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = trajectory("exponential")
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = trajectory(None)
    """Iterations of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = trajectory(None)
    """Samples of the last phase of WSD, for runs counted in samples."""
    start_weight_decay: float | None = trajectory(None)
    """Weight decay at the first step; needs --end-weight-decay and a --weight-decay-incr-style."""
    end_weight_decay: float | None = trajectory(None)
    """Weight decay at the last step."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = trajectory("constant")
    """Shape of the way from the first to the last weight decay."""
