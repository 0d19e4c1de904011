"""PieceTable: where the pieces of logical shards lie in flat tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.ops.digest_pieces.definition import shard_key

TILE = 8192
"""Words of one piece that a kernel's program reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceAt:
    """Words ``start ... start + length`` of a logical shard of tensor ``name``, from word ``offset`` of a flat tensor
    on."""

    name: str
    shard: int
    start: int
    length: int
    offset: int


class PieceTable:
    """Pieces, and the tiles that kernels cut them into; the copies on a device are made once."""

    def __init__(self, pieces: Iterable[PieceAt]) -> None:
        self.pieces = tuple(pieces)
        self.keys = tuple(shard_key(piece.name, piece.shard) for piece in self.pieces)
        self.alignment = math.gcd(*(piece.offset for piece in self.pieces if piece.length))
        """The greatest number that divides all offsets; 0 where all are 0."""
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def longest(self) -> int:
        """Most tiles of one piece."""
        return max((-(-piece.length // TILE) for piece in self.pieces), default=0)

    def __len__(self) -> int:
        return len(self.pieces)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 ``[P, 5]`` (offset, length, start, both keys), int64 ``[T, 2]`` (piece of each tile, and the tile's
        first word within the piece), int64 ``[P + 1]`` (first tile of each piece, and their number)."""
        if device not in self._copies:
            facts = [
                (piece.offset, piece.length, piece.start, *key)
                for piece, key in zip(self.pieces, self.keys, strict=True)
            ]
            counts = torch.tensor([-(-piece.length // TILE) for piece in self.pieces], dtype=torch.int64)
            first = torch.tensor([0, *itertools.accumulate(counts.tolist())], dtype=torch.int64)
            of_tile = torch.repeat_interleave(torch.arange(len(self.pieces)), counts)
            begin = (torch.arange(of_tile.numel()) - first[of_tile]) * TILE
            table = torch.tensor(facts, dtype=torch.int64).view(-1, 5)
            tiles = torch.stack((of_tile, begin), dim=1)
            self._copies[device] = table.to(device), tiles.to(device), first.to(device)
        return self._copies[device]
