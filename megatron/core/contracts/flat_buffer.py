"""What the optimizer may ask of a flat buffer of weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.contracts.param_spec import ParamSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive elements of one logical shard in a flat buffer: elements ``start ... start + length`` of shard
    ``shard`` (a global index) of ``spec``, from buffer element ``offset`` on. Padding is in no piece."""

    spec: ParamSpec
    shard: int
    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        """Buffer element after the last."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive elements of a flat buffer inside one bucket, and the pieces in them; both ends are multiples of
    ``SHARD_ALIGNMENT``, and a span may hold nothing but padding."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Number of elements, padding included."""
        return self.stop - self.start


class FlatBuffer(Protocol):
    """Working weights and fp32 gradients of some parameters, element for element at the same offsets."""

    @property
    def weights(self) -> torch.Tensor:
        """Flat working weights, complete; the parameters are views of it."""
        ...

    @property
    def grad(self) -> torch.Tensor:
        """Flat fp32 gradient; after the reduction the owned spans hold the final one."""
        ...

    @property
    def owned(self) -> tuple[Span, ...]:
        """This rank's equal cut of every bucket."""
        ...

    @property
    def whole(self) -> tuple[Span, ...]:
        """Every bucket, uncut."""
        ...

    @property
    def local_extremes(self) -> list[torch.Tensor]:
        """Per bucket (smallest, largest) element of this rank's gradient before the last reduction; NaN spreads."""
        ...

    def gather(self, flat: torch.Tensor) -> None:
        """Give every rank all owned spans of any flat tensor with the buffer's offsets."""
        ...

    def complete_weights(self) -> None:
        """Wait for working weights that are still being gathered; for code that has kept a reference to the tensor."""
        ...

    def gather_weights(self) -> None:
        """Give every rank the working weights of all owned spans."""
        ...

    def gather_grads(self) -> None:
        """Give every rank the final gradient of all owned spans."""
        ...
