"""How the model is spread over ranks, physically and logically."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import layout, trajectory


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """Sizes of the parallel axes. ``None`` means "not given" and is filled by ``resolve``."""

    tensor_model_parallel_size: int = layout(1)
    """Ranks that share one layer's weights."""
    pipeline_model_parallel_size: int = layout(1)
    """Pipeline stages; each holds consecutive layers, or several such chunks where the pattern has more segments."""
    expert_model_parallel_size: int = layout(1)
    """Ranks that share the routed experts of one MoE layer; divides the number of experts."""
    expert_tensor_parallel_size: int | None = layout(None)
    """Ranks that share one routed expert's weights; default: the tensor-parallel size."""
    sequence_parallel: bool = trajectory(False)
    """Cut activations along the sequence between tensor-parallel regions; MoE under tensor parallelism needs it."""
    logical_data_parallel_size: int | None = layout(None)
    """Number of logical shards that one global batch is cut into; default: the data-parallel size of the launch.
    It fixes the order of every sum, so the same value gives the same bits on any data-parallel size dividing it."""
    logical_reduce_block_size: int | None = layout(None)
    """Consecutive logical shards whose gradients are summed first (B); default: min(LDP, max(1, 8 // TP))."""
    overlap_p2p_communication: bool = layout(True)
    """Sending and receiving beside passes that do not need what is on its way, between pipeline stages that hold
    several chunks. Stages with one chunk never do."""
