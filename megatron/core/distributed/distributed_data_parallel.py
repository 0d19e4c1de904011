"""DistributedDataParallel: the gradient buffers of one rank's chunks, from zero to the final gradient."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.contracts.stage import Stage
from megatron.core.distributed.bucket_plan import plan_buffers
from megatron.core.distributed.finalize_model_grads import reduce_model_grads, update_expert_bias
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.ordered_reduce import FloatSums
from megatron.core.process_groups.topology import LogicalLayout


def distinct_parameters(chunks: Sequence[Stage]) -> list[ModelParameter]:
    """Parameters of all chunks in registration order; one that several chunks share is listed once."""
    found: dict[int, ModelParameter] = {}
    for chunk in chunks:
        for param in chunk.model_parameters():
            found.setdefault(id(param), param)
    return list(found.values())


class DistributedDataParallel:
    """Owns the flat weights and main gradients of this rank's chunks, and takes their parameters over.

    A step is ``zero_grad_buffer()``, forwards and backwards, ``finalize_model_grads()``, then the optimizer's step on
    ``buffers``.

    Raises:
        ConfigError: the bucket settings contradict each other.
        ValueError: the logical data-parallel size is not the physical one, or a ParamSpec contradicts itself.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        config: DistributedDataParallelConfig,
        *,
        groups: ProcessGroups,
        sums: FloatSums,
        layout: LogicalLayout,
    ) -> None:
        if layout.ldp != groups.dp.size:
            raise ValueError(f"{layout.ldp} logical shards on {groups.dp.size} data-parallel ranks need several passes")
        self.chunks, self.groups, self.sums, self.layout = tuple(chunks), groups, sums, layout
        params = {param.spec.name: param for param in distinct_parameters(chunks)}
        specs = [param.spec for param in distinct_parameters(chunks)]
        plans = plan_buffers(specs, dp=groups.dp.size, edp=groups.edp.size, config=config)
        self.buffers = tuple(
            ParamAndGradBuffer(
                plan,
                [params[placement.spec.name] for placement in plan.placements],
                groups.edp if plan.key.expert else groups.dp,
                leaves=2 if plan.key.two_stage and groups.pp.size == 1 else 1,
            )
            for plan in plans
        )

    def zero_grad_buffer(self) -> None:
        """Start a step: every main gradient is +0.0."""
        for buffer in self.buffers:
            buffer.zero_grad()

    def finalize_model_grads(self) -> None:
        """End the last backward: owned spans hold the final gradient, expert biases have moved."""
        reduce_model_grads(self.buffers, self.groups, self.sums, self.layout)
        update_expert_bias((router for chunk in self.chunks for router in chunk.balanced_routers()), self.groups)
