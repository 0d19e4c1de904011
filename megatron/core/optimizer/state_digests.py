"""StateDigests: layout-free digests of weights, masters and moments, in a few launches and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.contracts.flat_buffer import Piece, Span
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.ops.digest_pieces.definition import layout_free_digest, words_of
from megatron.core.ops.digest_pieces.table import PieceAt, PieceTable
from megatron.core.optimizer.sharded_state import ShardedState

WEIGHTS = "params"

Digests = dict[str, torch.Tensor]
"""int64 ``[2]`` by kind."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Flat tensors of one length that hold the same pieces; ``counted`` ``[P, 1]`` is 1 for
    pieces that count, else 0."""

    tensors: Mapping[str, torch.Tensor]
    table: PieceTable
    counted: torch.Tensor


class StateDigests:
    """Reads everything this rank holds; ``counts`` says of which parameters its owned pieces count, so that every
    logical element counts once over the world."""

    def __init__(
        self, states: Sequence[ShardedState], op: Callable[..., torch.Tensor], counts: Callable[[ParamSpec], bool]
    ) -> None:
        self._op, self._counts = op, counts
        self._sources: list[_Source] = []
        for state in states:
            whole = [piece for span in state.buffer.whole for piece in span.pieces]
            self._add(state, {WEIGHTS: state.buffer.weights}, whole, lambda piece: piece.offset)
            self._add(state, state.tensors(), state.held(), state.offset_of)

    def _add(
        self,
        state: ShardedState,
        tensors: Mapping[str, torch.Tensor],
        pieces: Iterable[Piece],
        offset: Callable[[Piece], int],
    ) -> None:
        parts = list(split_by_owner(pieces, state.buffer.owned))
        table = PieceTable(
            PieceAt(name=p.spec.name, shard=p.shard, start=p.start, length=p.length, offset=offset(p)) for p, _ in parts
        )
        counted = [owned and self._counts(piece.spec) for piece, owned in parts]
        device = state.buffer.weights.device
        self._sources.append(
            _Source(tensors, table, torch.tensor(counted, dtype=torch.int64, device=device).unsqueeze(1))
        )

    def totals(self) -> tuple[Digests, Digests]:
        """Sums over the pieces that count, and over all that is held here, copies included; from one reading."""
        counted: Digests = {}
        held: Digests = {}
        for source in self._sources:
            digests = self._op(source.table, *(words_of(flat) for flat in source.tensors.values()))
            for kind, of_pieces in zip(source.tensors, digests, strict=True):
                zero = torch.zeros(2, dtype=torch.int64, device=of_pieces.device)
                counted[kind] = counted.get(kind, zero) + (of_pieces * source.counted).sum(0)
                held[kind] = held.get(kind, zero) + of_pieces.sum(0)
        return counted, held


def split_by_owner(pieces: Iterable[Piece], owned: Sequence[Span]) -> Iterator[tuple[Piece, bool]]:
    """The same pieces cut at the borders of a rank's own spans, each with whether it lies in one of them."""
    for piece in pieces:
        inside = [(span.start, span.stop) for span in owned if span.start < piece.stop and piece.offset < span.stop]
        borders = {piece.offset, piece.stop}
        borders |= {at for ends in inside for at in ends if piece.offset < at < piece.stop}
        ordered = sorted(borders)
        for start, stop in zip(ordered, ordered[1:], strict=False):
            part = replace(piece, start=piece.start + start - piece.offset, length=stop - start, offset=start)
            yield part, any(begin <= start and stop <= end for begin, end in inside)


def piece_digest(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """Layout-free digest (int64 ``[2]``) of one piece's values; digests of the pieces of a shard add up."""
    return layout_free_digest(values, piece.spec.name, piece.shard, piece.start)
