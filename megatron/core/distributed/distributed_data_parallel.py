"""DistributedDataParallel: the gradient buffers of one rank's chunks, from zero to the final gradient."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.contracts.stage import Stage
from megatron.core.distributed.bucket_plan import plan_buffers
from megatron.core.distributed.finalize_model_grads import finish_gradients, is_final, update_expert_bias
from megatron.core.distributed.gradient_passes import GradientPasses, plan_units
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.distributed.param_gather import ParamGather
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


def _chunk_of(chunks: Sequence[Stage]) -> dict[str, int]:
    """By name, the chunk that fills a parameter's gradient; of one of both pipeline ends, the first that has it."""
    found: dict[str, int] = {}
    for index, chunk in enumerate(chunks):
        for param in chunk.model_parameters():
            spec = param.spec
            if found.setdefault(spec.name, index) != index and len(spec.stages) < 2:
                raise ValueError(f"two parameters of one rank are called {spec.name}, or two chunks share it")
    return found


class DistributedDataParallel:
    """Owns the flat weights and main gradients of this rank's chunks, and takes their parameters over.

    A step is ``zero_grad_buffer()``, then forwards and backwards with ``begin_backward(chunk, last)`` before every
    backward and ``end_pass(chunk)`` after each pass, then ``finalize_model_grads()``, then the optimizer's step on
    ``buffers``. A pass is what a chunk does for one logical shard; DP ranks work on DP shards at once, so a step has
    LDP / DP passes.

    Raises:
        ValueError: the data-parallel size does not divide the logical one, or a ParamSpec contradicts itself.
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
        if layout.ldp % groups.dp.size:
            raise ValueError(f"{layout.ldp} logical shards do not divide by {groups.dp.size} data-parallel ranks")
        self.chunks, self.groups, self.sums, self.layout = tuple(chunks), groups, sums, layout
        params = {param.spec.name: param for param in distinct_parameters(chunks)}
        plans = plan_buffers(
            [param.spec for param in distinct_parameters(chunks)],
            dp=groups.dp.size,
            edp=groups.edp.size,
            config=config,
            chunk_of=_chunk_of(chunks),
        )
        self.buffers = tuple(
            ParamAndGradBuffer(
                plan,
                [params[placement.spec.name] for placement in plan.placements],
                groups.edp if plan.key.expert else groups.dp,
                leaves=2 if plan.key.two_stage and groups.pp.size == 1 else 1,
                num_chunks=len(self.chunks),
            )
            for plan in plans
        )
        units = plan_units(self.buffers, self.chunks)
        self._gather = ParamGather(self.buffers, self.chunks, units) if config.overlap_param_gather else None
        self._passes = GradientPasses(
            self.buffers,
            sums,
            layout,
            units=units,
            device=groups.device,
            num_passes=layout.ldp // groups.dp.size,
            in_bf16=config.grad_reduce_in_bf16,
            overlap=config.overlap_grad_reduce,
        )

    def zero_grad_buffer(self) -> None:
        """Start a step: every main gradient is +0.0."""
        for buffer in self.buffers:
            buffer.zero_grad()
        self._passes.start()

    def gather_weights(self) -> None:
        """Give every rank the new working weights of all owned spans; with ``overlap_param_gather`` they are on their
        way when it returns, and forwards wait for what they use."""
        if self._gather is not None:
            self._gather.start()
            return
        for buffer in self.buffers:
            buffer.gather_weights()

    def finish_gather(self) -> None:
        """Wait for all weights that are on their way."""
        if self._gather is not None:
            self._gather.finish()

    def begin_forward(self, chunk: int) -> None:
        """Before every forward of a chunk."""
        if self._gather is not None:
            self._gather.begin_forward(chunk)

    def begin_backward(self, chunk: int, last: bool) -> None:
        """Before every backward of a chunk; ``last``: it is the chunk's last one for a logical shard. With
        ``overlap_grad_reduce`` each bucket leaves during that one, as soon as its gradients are complete.

        Raises:
            LateGradientError: a gradient of the pass before arrived after it was sent.
        """
        self._passes.begin_backward(chunk, last)

    def end_pass(self, chunk: int) -> None:
        """After a chunk's last backward for a logical shard: its main gradients join the sum over shards, and are +0.0
        again unless this was the last pass. Call it on all ranks of a stage at the same place."""
        self._passes.end(chunk)
        if self._gather is not None:
            self._gather.check(chunk, self._passes.used)

    def finalize_model_grads(self, num_tokens: int | None = None) -> None:
        """End a step: owned spans hold the final gradient, expert biases have moved. Ends the last pass of every chunk
        that has not ended it. The sum over shards is divided by their number, or by ``num_tokens``, the unmasked tokens
        of the global batch, where the loss is a sum over tokens.

        Raises:
            RuntimeError: more than the last pass is missing, or a gradient would be lost: autograd put it into a
                parameter's ``.grad``, or it arrived after its bucket was sent.
        """
        self._passes.finish()
        finish_gradients(self.buffers, self.groups, self.sums, self._divisor(num_tokens))
        update_expert_bias((router for chunk in self.chunks for router in chunk.balanced_routers()), self.groups)

    def leaves_gradients(self, num_tokens: int | None = None) -> bool:
        """Whether ``finalize_model_grads`` will change no gradient: one term a sum, and nothing to divide by."""
        divisor = self._divisor(num_tokens)
        return self._passes.add_nothing and all(is_final(buffer, self.groups, divisor) for buffer in self.buffers)

    def _divisor(self, num_tokens: int | None) -> int:
        return self.layout.ldp if num_tokens is None else max(1, num_tokens)
