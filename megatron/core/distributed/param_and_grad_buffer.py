"""ParamAndGradBuffer: working weights and fp32 main gradients of some parameters, flat, at the same offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.distributed.bucket_plan import BufferPlan, plan_spans
from megatron.core.process_groups.collectives import Waiting, start_all_gather
from megatron.core.process_groups.groups import Group


def _view(flat: torch.Tensor, spec: ParamSpec, offset: int) -> torch.Tensor:
    """The parameter at ``offset`` of a flat buffer; an expert's dimension steps from shard to shard."""
    shape = spec.local_shape
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    if spec.expert:
        strides[0] = spec.shard_stride
    return flat.as_strided(shape, strides, flat.storage_offset() + offset)


class ParamAndGradBuffer:
    """Storage of one buffer of the plan.

    Takes over the parameters: ``param.data`` becomes a view of ``weights``, ``param.main_grads`` views of the fp32
    buffers. A parameter used by both pipeline ends has two gradient buffers where one rank holds both ends
    (``leaves`` 2): the first chunk of the rank's ``num_chunks`` fills one, the last the other; where the ends are on
    two ranks each has the one it fills, under both names.
    """

    def __init__(
        self, plan: BufferPlan, params: Sequence[ModelParameter], group: Group, leaves: int, num_chunks: int = 1
    ) -> None:
        dtypes = {param.dtype for param in params}
        if len(dtypes) > 1 or (plan.key.fp32 and dtypes != {torch.float32}):
            raise ValueError(f"parameters of one buffer have types {dtypes}: {[param.spec.name for param in params]}")
        device = params[0].device
        self.plan, self.group = plan, group
        self.params = tuple(params)
        self._weights = torch.zeros(plan.numel, dtype=params[0].dtype, device=device)
        self._arriving: dict[int, Waiting] = {}
        self.grads = tuple(torch.zeros(plan.numel, dtype=torch.float32, device=device) for _ in range(leaves))
        self.owned = plan_spans(plan, group.rank, group.size)
        self.whole = plan_spans(plan, 0, 1)
        self._num_chunks = num_chunks
        # Called with every (leaf, bucket) that is about to be reduced, where it is set.
        self.watch: Callable[[int, int], None] | None = None
        self._extremes: dict[int, torch.Tensor] = {}
        for placement, param in zip(plan.placements, params, strict=True):
            view = _view(self._weights, param.spec, placement.offset)
            view.copy_(param.data)
            param.data = view
            # Views of an alias each, so that torch counts the writes to every parameter by itself.
            views = [_view(grad.data, param.spec, placement.offset) for grad in self.grads]
            param.main_grads = tuple(views * (2 // leaves) if plan.key.two_stage else views)

    @property
    def weights(self) -> torch.Tensor:
        """Flat working weights, complete: reading this waits for those that are still being gathered."""
        self.complete_weights()
        return self._weights

    @property
    def grad(self) -> torch.Tensor:
        """Flat fp32 gradient; after the reduction the owned spans hold the final one."""
        return self.grads[0]

    @property
    def local_extremes(self) -> list[torch.Tensor]:
        """Per bucket (smallest, largest) element of all that this rank gave to the reduction; NaN spreads."""
        return [ends for _, ends in sorted(self._extremes.items())]

    def zero_grad(self) -> None:
        """Set all main gradients to +0.0, and forget their extremes."""
        self._extremes.clear()
        for grad in self.grads:
            grad.zero_()

    def filled_by(self, chunk: int) -> Iterator[tuple[int, int]]:
        """(gradient buffer, bucket) of everything that one chunk of this rank adds into."""
        if len(self.grads) == 1:
            yield from ((0, bucket) for bucket, owner in enumerate(self.plan.bucket_chunks) if owner == chunk)
            return
        for leaf, owner in enumerate((0, self._num_chunks - 1)):
            if owner == chunk:
                yield from ((leaf, bucket) for bucket in range(len(self.plan.buckets)))

    def params_in(self, bucket: int) -> tuple[ModelParameter, ...]:
        """The parameters of one bucket."""
        start, stop = self.plan.buckets[bucket]
        placed = zip(self.plan.placements, self.params, strict=True)
        return tuple(param for placement, param in placed if start <= placement.offset < stop)

    def bucket(self, leaf: int, bucket: int) -> torch.Tensor:
        """One bucket of one gradient buffer."""
        start, stop = self.plan.buckets[bucket]
        return self.grads[leaf][start:stop]

    def own_part(self, leaf: int, bucket: int) -> torch.Tensor:
        """This rank's cut of it."""
        span = self.owned[bucket]
        return self.grads[leaf][span.start : span.stop]

    def record_extremes(self, leaf: int, bucket: int) -> None:
        """Take the bucket as it stands into its extremes, before it is reduced."""
        if self.watch is not None:
            self.watch(leaf, bucket)
        low, high = torch.aminmax(self.bucket(leaf, bucket))
        if bucket in self._extremes:
            before = self._extremes[bucket]
            low, high = torch.minimum(low, before[0]), torch.maximum(high, before[1])
        self._extremes[bucket] = torch.stack([low, high])

    def gather(self, flat: torch.Tensor) -> None:
        """Give every rank all owned spans of any flat tensor with the buffer's offsets."""
        for start, stop in self.plan.buckets:
            start_all_gather(self.group, flat[start:stop])()

    def start_gather(self, bucket: int) -> None:
        """Begin to give every rank the working weights of all owned spans of a bucket, which must not be read or
        written until ``await_weights``."""
        start, stop = self.plan.buckets[bucket]
        self._arriving[bucket] = start_all_gather(self.group, self._weights[start:stop])

    def await_weights(self, bucket: int) -> None:
        """Wait for the bucket's weights, where they are on their way."""
        if bucket in self._arriving:
            self._arriving.pop(bucket)()

    def complete_weights(self) -> None:
        """Wait for all weights that are on their way."""
        for bucket in tuple(self._arriving):
            self.await_weights(bucket)

    def gather_weights(self) -> None:
        """Give every rank the working weights of all owned spans."""
        self.gather(self.weights)

    def gather_grads(self) -> None:
        """Give every rank the final gradient of all owned spans."""
        self.gather(self.grad)
