"""Contract of ``digest_pieces``."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_pieces.table import TILE, PieceAt, PieceTable
from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """One and three tensors, words of 1, 2 and 4 bytes, gaps, short and empty pieces, more than a tile, shards that
    begin late; nothing at all."""

    def draw(numel: int, word: torch.dtype) -> torch.Tensor:
        ends = torch.iinfo(word)
        return torch.randint(ends.min, ends.max, (numel,), generator=generator).to(word).to(device)

    wide = torch.int32 if dtype == torch.float32 else torch.int16
    several = [
        PieceAt(name="a", shard=0, start=0, length=1025, offset=0),
        PieceAt(name="a", shard=1, start=3 << 32, length=0, offset=2048),
        PieceAt(name="b.weight", shard=7, start=1024, length=2 * TILE + 77, offset=2048),
        PieceAt(name="c", shard=0, start=5 << 30, length=1, offset=2 * TILE + 4096),
    ]
    size = 2 * TILE + 5001
    one = PieceTable([PieceAt(name="w", shard=2, start=0, length=511, offset=0)])
    return [
        Case(name="three", args=(PieceTable(several), *(draw(size, wide) for _ in range(3)))),
        Case(name="one", args=(one, draw(511, wide))),
        Case(name="bytes", args=(one, draw(511, torch.uint8))),
        Case(name="empty", args=(PieceTable([]), draw(0, wide))),
    ]


def _cut(args: list, start: int, stop: int) -> list:
    """The pieces' parts in words ``start ... stop``; all pieces stay, some of them empty."""
    parts = []
    for piece in args[0].pieces:
        begin = min(max(piece.offset, start), stop)
        end = max(begin, min(piece.offset + piece.length, stop))
        at = piece.start + max(0, begin - piece.offset)
        parts.append(PieceAt(name=piece.name, shard=piece.shard, start=at, length=end - begin, offset=begin - start))
    return [PieceTable(parts), args[1], *(words[start:stop] for words in args[2:])]


SPEC = OpSpec(
    name="digest_pieces",
    promise="digest_pieces(table, words, ...) -> int64 [tensors, P, 2]: the layout-free digest (digest_pieces/"
    "definition.py) of each of the table's P pieces of logical shards, in each of the flat integer tensors.",
    order="Wrapping sums of integers, exact in any order.",
    cases=cases,
    tolerance=tolerances(0.0, 0.0, "integers"),
    exact=True,
    cuts=(Cut(name="elements", level=Guarantee.LAYOUT, args={1: 0}, outs=(None,), adjust=_cut),),
)
