"""The definition of ``digest_pieces``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_pieces.definition import digest_of_words
from megatron.core.ops.digest_pieces.table import PieceTable
from megatron.core.ops.registry import Guarantee, Variant


def digest_pieces(table: PieceTable, *words: torch.Tensor) -> torch.Tensor:
    """Layout-free digests (definition.py) of the table's pieces in each of the flat integer tensors ``words``, which
    all have the table's offsets: int64 ``[len(words), P, 2]``."""
    out = torch.zeros(len(words), len(table), 2, dtype=torch.int64, device=words[0].device)
    for place, (piece, key) in enumerate(zip(table.pieces, table.keys, strict=True)):
        if piece.length:
            parts = [flat[piece.offset : piece.offset + piece.length] for flat in words]
            out[:, place] = digest_of_words(parts, key, piece.start)
    return out


VARIANT = Variant(
    name="reference",
    fn=digest_pieces,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_pieces.definition", "megatron.core.ops.digest_pieces.table"),
)
