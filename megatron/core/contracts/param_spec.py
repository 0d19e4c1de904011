"""How one parameter is named, sharded, reduced, decayed and initialised: the facts model and engine share.

A parameter is a list of *logical shards*. The logical layout fixes them: a dense weight has one shard per
tensor-parallel rank (a replicated one has a single shard), a routed expert's weight one per (expert, expert tensor
rank). Every shard starts at a multiple of ``SHARD_ALIGNMENT`` elements in every flat buffer, so that sums, norms,
digests and checkpoint cuts fall on the same borders in every physical layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SHARD_ALIGNMENT = 1024
"""Elements; also the length of the norm's summation blocks, and 2 KiB in bfloat16."""

Box = tuple[tuple[int, int], ...]
"""One rectangular piece of a global tensor: (start, stop) for every dimension."""


def align(numel: int) -> int:
    """``numel`` rounded up to a multiple of ``SHARD_ALIGNMENT``."""
    return -(-numel // SHARD_ALIGNMENT) * SHARD_ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalShard:
    """One logical shard: boxes of the global tensor laid one after the other along ``dim``.

    Several boxes are needed where a projection has parts (z, x, B, C, dt of a mixer; gate and up of SwiGLU) and each
    rank holds its cut of every part.
    """

    index: int
    boxes: tuple[Box, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        extents = [[stop - start for start, stop in box] for box in self.boxes]
        total = sum(extent[self.dim] for extent in extents)
        return tuple(total if d == self.dim else n for d, n in enumerate(extents[0]))

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Initial:
    """Distribution of the initial values, drawn in fp64 from counter-based bits and rounded once to fp32.

    ``normal(0, a)``; ``uniform(a, b)``; ``constant(a)``; ``log_uniform(a, b)``: the logarithm of a uniform draw;
    ``inverse_softplus_log_uniform(a, b, floor)``: softplus inverse of max(exp(U(log a, log b)), floor).
    """

    kind: Literal["normal", "uniform", "constant", "log_uniform", "inverse_softplus_log_uniform"]
    a: float
    b: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """Everything the engine needs to know of one parameter on this rank.

    Attributes:
        name: global name, the same on every layout (surface of the state dict, e.g.
            ``decoder.layers.3.mixer.in_proj.weight``); layers carry their global 0-based index.
        shape: global shape, with the expert axis first for routed experts.
        num_shards: number of logical shards of the whole parameter.
        shards: the ones this rank holds, in index order. A dense parameter holds one, of its own shape; a routed
            expert's parameter holds one per local expert, stacked along dimension 0.
        initial: distribution of the initial values.
        expert: reduced over the expert grid instead of the dense one.
        tp_replicated: every tensor-parallel rank holds the same (only) shard; norm and digests count it once.
        tp_partial: the gradients of those copies are partial and are summed over the tensor-parallel ranks.
        fp32: the working weight stays fp32 in a bfloat16 run.
        weight_decay: the optimizer decays it.
        stages: pipeline ends that use it. ``("first", "last")`` makes two main-gradient buffers at every pipeline
            size, added in that order; the parameter is held by both ends and counted once.
    """

    name: str
    shape: tuple[int, ...]
    num_shards: int
    shards: tuple[LogicalShard, ...]
    initial: Initial
    expert: bool = False
    tp_replicated: bool = False
    tp_partial: bool = False
    fp32: bool = False
    weight_decay: bool = True
    stages: tuple[Literal["first", "last"], ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor this rank holds."""
        first = self.shards[0].shape
        return (len(self.shards), *first[1:]) if self.expert else first

    @property
    def shard_stride(self) -> int:
        """Elements from one logical shard's start to the next in a flat buffer."""
        return align(self.shards[0].numel)

    @property
    def buffer_numel(self) -> int:
        """Elements the parameter takes in a flat buffer, padding included."""
        return self.shard_stride * len(self.shards)


def replicated_shard(shape: tuple[int, ...]) -> LogicalShard:
    """The single shard of a parameter that is not cut."""
    return LogicalShard(index=0, boxes=(tuple((0, n) for n in shape),))


def cut_shard(
    shape: tuple[int, ...], dim: int, rank: int, size: int, parts: tuple[int, ...] | None = None
) -> LogicalShard:
    """Shard ``rank`` of ``size`` equal cuts along ``dim``; with ``parts`` every part (their sizes add up to the
    dimension) is cut by itself and the pieces follow one another.

    Raises:
        ValueError: a part does not divide by ``size``.
    """
    boxes, offset = [], 0
    for part in parts or (shape[dim],):
        if part % size:
            raise ValueError(f"a part of {part} elements does not divide by {size} (shape {shape}, dimension {dim})")
        start = offset + part // size * rank
        boxes.append(tuple((start, start + part // size) if d == dim else (0, n) for d, n in enumerate(shape)))
        offset += part
    return LogicalShard(index=rank, boxes=tuple(boxes), dim=dim)


def expert_shard(
    shape: tuple[int, int, int], expert: int, dim: int, rank: int, size: int, parts: tuple[int, ...] | None = None
) -> LogicalShard:
    """Logical shard of one expert's weight in a stacked ``[E, rows, columns]`` parameter, cut along ``dim`` (1 or 2)
    over the expert tensor ranks; the shard index is ``expert * size + rank``."""
    cut = cut_shard(shape, dim, rank, size, parts)
    boxes = tuple(((expert, expert + 1), *box[1:]) for box in cut.boxes)
    return LogicalShard(index=expert * size + rank, boxes=boxes, dim=dim)
