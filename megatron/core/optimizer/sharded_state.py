"""ShardedState: fp32 masters and moments of one flat buffer, as far as this rank holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.core.contracts.flat_buffer import FlatBuffer, Piece
from megatron.core.digest.bits import same_bits
from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.digest_pieces.table import PieceAt
from megatron.core.optimizer.shard_plan import StateOffsets, split_by_owner
from megatron.core.optimizer.state_kinds import MAIN_PARAMS, MOMENTS
from megatron.core.rng.counter import draw_shard

_AT_ONCE = 1 << 22
"""Elements compared at a time."""


class ShardedState:
    """Flat fp32 ``main_params`` and the ``moments``, zeros at first, by name.

    ``distributed`` holds the owned spans of the buffer only, otherwise all of it. ``parts`` are the pieces that are
    held, cut at the borders of the owned spans, each with whether it is owned; ``plan`` is where they lie. Masters are
    drawn again from the seed, so they are the exact fp32 values whose cast the working weights are.

    Raises:
        ValueError: a working weight is not the cast of its draw (another seed, or weights changed since).
    """

    def __init__(
        self, buffer: FlatBuffer, distributed: bool, seed: int, moments: Sequence[str] = MOMENTS["adam"]
    ) -> None:
        self.buffer, self.distributed = buffer, distributed
        self.spans = buffer.owned if distributed else buffer.whole
        self._offsets = StateOffsets(self.spans)
        device = buffer.weights.device
        self._tensors = {
            name: torch.zeros(self._offsets.numel, dtype=torch.float32, device=device)
            for name in (MAIN_PARAMS, *moments)
        }
        self.parts = tuple(split_by_owner(self.held(), buffer.owned))
        self.plan = UpdatePlan(
            [
                PieceAt(name=p.spec.name, shard=p.shard, start=p.start, length=p.length, offset=self.offset_of(p))
                for p, _ in self.parts
            ],
            [p.offset for p, _ in self.parts],
            [bool(p.spec.weight_decay) for p, _ in self.parts],
        )
        self._draw_masters(seed)

    @property
    def main_params(self) -> torch.Tensor:
        """The flat masters."""
        return self._tensors[MAIN_PARAMS]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, each flat."""
        return dict(self._tensors)

    def held(self) -> Iterator[Piece]:
        """Every piece whose state is here."""
        for span in self.spans:
            yield from span.pieces

    def offset_of(self, piece: Piece) -> int:
        """Where a piece, or a part of one, that is held here lies in the flat tensors."""
        return self._offsets.at(piece.offset)

    def view(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The part of one of the flat tensors that belongs to buffer elements ``start ... stop`` of one span."""
        begin = self._offsets.at(start)
        return flat[begin : begin + stop - start]

    def _draw_masters(self, seed: int) -> None:
        for piece in self.held():
            spec, drawn = piece.spec, self.view(self.main_params, piece.offset, piece.stop)
            shard = next(shard for shard in spec.shards if shard.index == piece.shard)
            draw_shard(spec, shard, seed, drawn, piece.start)
            working = self.buffer.weights[piece.offset : piece.stop]
            for values, weights in zip(drawn.split(_AT_ONCE), working.split(_AT_ONCE), strict=True):
                if not same_bits(values.to(weights.dtype), weights):
                    raise ValueError(f"{spec.name} does not hold the initial values of seed {seed}")

    def share(self) -> None:
        """Where every rank holds the whole state, complete it from the owned spans of all of them; nothing to do where
        each holds its own."""
        if not self.distributed:
            for flat in self.tensors().values():
                self.buffer.gather(flat)

    def write_working_weights(self) -> None:
        """Working weights = masters, rounded once to the working type, as far as the masters are here."""
        weights = self.buffer.weights
        for span in self.spans:
            weights[span.start : span.stop].copy_(self.view(self.main_params, span.start, span.stop))
