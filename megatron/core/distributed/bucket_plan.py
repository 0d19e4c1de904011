"""Where every parameter lies in the flat buffers, where buckets end, and who owns which range; pure.

A parameter and its gradient share offsets. Every logical shard starts at a multiple of ``SHARD_ALIGNMENT`` elements
and every bucket ends at a multiple of that times the number of ranks that share it, so a cut between ranks never falls
inside a summation block of the norm.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.config.optimizer import DistributedDataParallelConfig, default_bucket_size
from megatron.core.contracts.flat_buffer import Piece, Span
from megatron.core.contracts.param_spec import SHARD_ALIGNMENT, ParamSpec


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class BufferKey:
    """What the parameters of one buffer have in common.

    ``two_stage`` is the name of a parameter used by both pipeline ends, which has a buffer of its own so that both
    ends cut it alike; empty otherwise. Those come last in the order, and in the order of their names, because their
    reduction is a meeting of two stages.
    """

    two_stage: str
    expert: bool
    fp32: bool
    tp_partial: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One parameter in a buffer: its shard i starts at ``offset + i * spec.shard_stride``."""

    spec: ParamSpec
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """One buffer: its parameters by ascending offset, the end of each bucket, the chunk of this rank whose parameters
    a bucket holds, and how many ranks share a bucket."""

    key: BufferKey
    placements: tuple[Placement, ...]
    bucket_ends: tuple[int, ...]
    bucket_chunks: tuple[int, ...]
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.bucket_ends[-1]

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every bucket."""
        return tuple(zip((0, *self.bucket_ends[:-1]), self.bucket_ends, strict=True))


def plan_bucket_size(config: DistributedDataParallelConfig, dp: int, numel: int) -> int:
    """Elements after which a bucket is closed: ``ddp_bucket_size``, or ``numel`` (elements of all buffers of this
    rank) over ``ddp_num_buckets``, or the default."""
    if config.ddp_bucket_size is not None:
        return config.ddp_bucket_size
    if config.ddp_num_buckets is not None:
        return max(1, numel // config.ddp_num_buckets)
    return default_bucket_size(dp)


def _key(spec: ParamSpec) -> BufferKey:
    two_stage = spec.name if len(spec.stages) == 2 else ""
    if spec.expert and (spec.tp_partial or two_stage):
        raise ValueError(f"{spec.name}: a routed expert's gradient is neither partial over TP nor of two stages")
    return BufferKey(two_stage=two_stage, expert=spec.expert, fp32=spec.fp32, tp_partial=spec.tp_partial)


def _plan_buffer(
    key: BufferKey, specs: Sequence[ParamSpec], ranks: int, bucket_size: int, chunk_of: Mapping[str, int]
) -> BufferPlan:
    grain = SHARD_ALIGNMENT * ranks
    placements: list[Placement] = []
    ends, chunks, offset = [0], [], 0
    for position, spec in enumerate(specs):
        placements.append(Placement(spec=spec, offset=offset))
        offset += spec.buffer_numel
        chunk = chunk_of.get(spec.name, 0)
        ends_chunk = position + 1 == len(specs) or chunk_of.get(specs[position + 1].name, 0) != chunk
        if ends_chunk or offset - ends[-1] >= bucket_size:
            offset = -(-offset // grain) * grain
            ends.append(offset)
            chunks.append(chunk)
    return BufferPlan(
        key=key,
        placements=tuple(placements),
        bucket_ends=tuple(ends[1:]),
        bucket_chunks=tuple(chunks),
        ranks=ranks,
    )


def plan_buffers(
    specs: Sequence[ParamSpec],
    *,
    dp: int,
    edp: int,
    config: DistributedDataParallelConfig,
    chunk_of: Mapping[str, int] | None = None,
) -> tuple[BufferPlan, ...]:
    """Buffers of one rank, in the order in which they are reduced.

    ``specs`` are in registration order and are laid out in reverse, so that the gradients that are ready first lie
    together. A parameter never crosses a bucket's end. All ranks of a pipeline stage get the same offsets.
    ``chunk_of`` says by name which of the rank's chunks a parameter belongs to (0 where it does not say); a bucket
    holds one chunk's, because chunks end their passes at different times.

    Raises:
        ValueError: two parameters have one name, or an expert claims steps that do not apply to it.
    """
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    seen = set()
    for spec in reversed(specs):
        if spec.name in seen:
            raise ValueError(f"two parameters of one rank are called {spec.name}")
        seen.add(spec.name)
        by_key.setdefault(_key(spec), []).append(spec)
    bucket_size = plan_bucket_size(config, dp, sum(spec.buffer_numel for spec in specs))
    return tuple(
        _plan_buffer(key, by_key[key], edp if key.expert else dp, bucket_size, chunk_of or {}) for key in sorted(by_key)
    )


def plan_pieces(plan: BufferPlan, start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of logical shards between two buffer elements, by ascending offset."""
    first = bisect.bisect_right(plan.placements, start, key=lambda p: p.offset) - 1
    pieces = []
    for placement in plan.placements[max(0, first) :]:
        if placement.offset >= stop:
            break
        spec = placement.spec
        for position, shard in enumerate(spec.shards):
            begin = placement.offset + position * spec.shard_stride
            low, high = max(start, begin), min(stop, begin + shard.numel)
            if low < high:
                pieces.append(Piece(spec=spec, shard=shard.index, start=low - begin, length=high - low, offset=low))
    return tuple(pieces)


def plan_spans(plan: BufferPlan, rank: int, ranks: int) -> tuple[Span, ...]:
    """Part ``rank`` of ``ranks`` equal parts of every bucket, one span per bucket (``ranks`` 1: the whole bucket)."""
    spans = []
    for start, stop in plan.buckets:
        length = (stop - start) // ranks
        low = start + rank * length
        spans.append(Span(start=low, stop=low + length, pieces=plan_pieces(plan, low, low + length)))
    return tuple(spans)
