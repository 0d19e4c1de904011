"""StateDigests: layout-free digests of weights, masters and moments, in a few launches and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.contracts.flat_buffer import FlatBuffer, Piece
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.ops.digest_pieces.definition import layout_free_digest, words_of
from megatron.core.ops.digest_pieces.table import PieceAt, PieceTable
from megatron.core.optimizer.shard_plan import split_by_owner
from megatron.core.optimizer.sharded_state import ShardedState

WEIGHTS = "params"

Digests = dict[str, torch.Tensor]
"""int64 ``[2]`` by kind."""

Written = Sequence[torch.Tensor] | None
"""By state, the digests of its parts and of the working weights, as a step wrote them, ``[kinds + 1, P, 2]``; ``[kinds
+ 2, P, 2]`` with that of the gradient, as the step read it. ``None``: they have to be read."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of one tensor of the state: ``shards`` of parameter ``name``, ``numel`` elements of them from
    element ``start`` of the first on."""

    kind: str
    name: str
    dtype: torch.dtype
    shards: tuple[int, ...]
    start: int
    numel: int


class _Source:
    """Flat tensors of one length that hold the same pieces; ``counted`` ``[P, 1]`` is 1 for pieces that count, else
    0."""

    def __init__(
        self,
        buffer: FlatBuffer,
        tensors: Mapping[str, torch.Tensor],
        parts: Sequence[tuple[Piece, int]],
        counted: Sequence[bool],
    ) -> None:
        self.buffer, self.tensors = buffer, tensors
        self.table = PieceTable(
            PieceAt(name=p.spec.name, shard=p.shard, start=p.start, length=p.length, offset=offset)
            for p, offset in parts
        )
        by_name: dict[str, list[Piece]] = {}
        for piece, _ in parts:
            by_name.setdefault(piece.spec.name, []).append(piece)
        self.by_name = by_name
        device = next(iter(tensors.values())).device
        self.counted = torch.tensor(counted, dtype=torch.int64, device=device).unsqueeze(1)
        rows = {name: row for row, name in enumerate(by_name)}
        self._row = torch.tensor([rows[piece.spec.name] for piece, _ in parts], dtype=torch.int64, device=device)

    def held(self) -> list[Held]:
        """What the tensors hold, by kind and then by parameter."""
        return [
            Held(
                kind,
                name,
                flat.dtype,
                tuple(dict.fromkeys(piece.shard for piece in pieces)),
                pieces[0].start,
                sum(piece.length for piece in pieces),
            )
            for kind, flat in self.tensors.items()
            for name, pieces in self.by_name.items()
        ]

    def by_parameter(self, digests: torch.Tensor) -> torch.Tensor:
        """From the digests of pieces ``[kinds, P, 2]`` to those of what ``held`` lists, ``[n, 2]``."""
        kinds = digests.shape[0]
        total = torch.zeros(kinds, len(self.by_name), 2, dtype=torch.int64, device=digests.device)
        return total.index_add_(1, self._row, digests).flatten(0, 1)


class StateDigests:
    """Reads everything this rank holds, which may be nothing; ``counts`` says of which parameters its owned pieces
    count, so that every logical element counts once over the world. ``kinds`` are those of the state's tensors."""

    def __init__(
        self,
        states: Sequence[ShardedState],
        op: Callable[..., torch.Tensor],
        counts: Callable[[ParamSpec], bool],
        *,
        kinds: Sequence[str],
        device: torch.device,
    ) -> None:
        self._op, self._counts = op, counts
        self._kinds = len(kinds)
        self._zero = {kind: torch.zeros(2, dtype=torch.int64, device=device) for kind in (WEIGHTS, *kinds)}
        self._weights: list[_Source] = []
        self._state: list[_Source] = []
        self._gradients: list[_Source] = []
        self._covered: list[bool] = []
        self._owned: list[torch.Tensor] = []
        for state in states:
            buffer = state.buffer
            whole = [piece for span in buffer.whole for piece in span.pieces]
            owned = [piece for span in buffer.owned for piece in span.pieces]
            self._weights.append(self._source(buffer, {WEIGHTS: buffer.weights}, whole, lambda piece: piece.offset))
            self._state.append(self._source(buffer, state.tensors(), state.held(), state.offset_of))
            self._covered.append(state.spans == buffer.whole)
            own = torch.tensor([n for n, (_, mine) in enumerate(state.parts) if mine], dtype=torch.int64)
            self._owned.append(own.to(buffer.weights.device))
            self._gradients.append(self._source(buffer, {"gradient": buffer.grad}, owned, lambda piece: piece.offset))
        self.weights_held, self.state_held, self.gradients_held = (
            _held(sources) for sources in (self._weights, self._state, self._gradients)
        )
        """What ``weights``, ``state`` and ``gradients`` list."""

    def _source(
        self,
        buffer: FlatBuffer,
        tensors: Mapping[str, torch.Tensor],
        pieces: Iterable[Piece],
        offset: Callable[[Piece], int],
    ) -> _Source:
        parts = list(split_by_owner(pieces, buffer.owned))
        counted = [owned and self._counts(piece.spec) for piece, owned in parts]
        return _Source(buffer, tensors, [(piece, offset(piece)) for piece, _ in parts], counted)

    def _read(self, source: _Source) -> torch.Tensor:
        source.buffer.complete_weights()
        return self._op(source.table, *(words_of(flat) for flat in source.tensors.values()))

    def totals(self, written: Written = None) -> tuple[Digests, Digests]:
        """Sums over the pieces that count, and over all that is held here, copies included; from one reading.

        Of what was ``written`` by this rank nothing is read again, only weights that other ranks have written.
        """
        counted, held = dict(self._zero), dict(self._zero)
        digests = (*self._of_weights(written), *self._of_state(written))
        for source, of_source in zip((*self._weights, *self._state), digests, strict=True):
            for kind, of_pieces in zip(source.tensors, of_source, strict=True):
                counted[kind] = counted[kind] + (of_pieces * source.counted).sum(0)
                held[kind] = held[kind] + of_pieces.sum(0)
        return counted, held

    def _of_weights(self, written: Written) -> list[torch.Tensor]:
        if written is None:
            return [self._read(source) for source in self._weights]
        weights, kinds = zip(self._weights, self._covered, written, strict=True), self._kinds
        return [here[kinds : kinds + 1] if covered else self._read(source) for source, covered, here in weights]

    def _of_state(self, written: Written) -> list[torch.Tensor]:
        if written is None:
            return [self._read(source) for source in self._state]
        return [here[: self._kinds] for here in written]

    def _of_gradients(self, written: Written) -> list[torch.Tensor]:
        if written is None or any(len(here) < self._kinds + 2 for here in written):
            return [self._read(source) for source in self._gradients]
        return [here[-1:, own] for here, own in zip(written, self._owned, strict=True)]

    def weights(self, written: Written = None) -> tuple[list[Held], torch.Tensor]:
        """Working weights by parameter, and their digests ``[n, 2]``."""
        return self.weights_held, self._joined(self._weights, self._of_weights(written))

    def state(self, written: Written = None) -> tuple[list[Held], torch.Tensor]:
        """Masters and moments by kind and parameter, and their digests ``[n, 2]``."""
        return self.state_held, self._joined(self._state, self._of_state(written))

    def gradients(self, written: Written = None) -> tuple[list[Held], torch.Tensor]:
        """This rank's owned parts of the final gradient by parameter, and their digests ``[n, 2]``."""
        return self.gradients_held, self._joined(self._gradients, self._of_gradients(written))

    def _joined(self, sources: Sequence[_Source], digests: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(sources, digests, strict=True)
        nothing = self._zero[WEIGHTS].new_zeros(0, 2)
        return torch.cat([nothing, *(source.by_parameter(of) for source, of in pairs if source.by_name)])


def _held(sources: Sequence[_Source]) -> list[Held]:
    return [held for source in sources if source.by_name for held in source.held()]


def piece_digest(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """Layout-free digest (int64 ``[2]``) of one piece's values; digests of the pieces of a shard add up."""
    return layout_free_digest(values, piece.spec.name, piece.shard, piece.start)
