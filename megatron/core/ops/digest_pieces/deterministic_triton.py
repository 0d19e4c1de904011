"""``digest_pieces`` in two launches for up to three tensors, each of which is read once."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_pieces.kernels.digest_pieces import digest_tiles_kernel, sum_tiles_kernel
from megatron.core.ops.digest_pieces.table import TILE, PieceTable
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.registry import Guarantee, Variant

BLOCK, READ_AT_ONCE = 512, 1024
LONGEST_VECTOR = 8
"""Words of the largest memory access, where all offsets are multiples of it."""
AT_ONCE = 3


def digest_pieces(table: PieceTable, *words: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference."""
    groups = [words[at : at + AT_ONCE] for at in range(0, len(words), AT_ONCE)]
    return torch.cat([_up_to_three(table, group) for group in groups])


def _up_to_three(table: PieceTable, words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    facts, tiles, _ = table.on(words[0].device)
    count, num_tiles = len(words), tiles.shape[0]
    if not num_tiles:
        return torch.zeros(count, len(table), 2, dtype=torch.int64, device=words[0].device)
    partial = torch.empty(count, num_tiles, 2, dtype=torch.int64, device=words[0].device)
    second, third = words[min(1, count - 1)], words[count - 1]
    run_kernel(
        digest_tiles_kernel, (num_tiles,),
        words[0], second, third, facts, tiles, partial, num_tiles,
        COUNT=count, ALIGNED=LONGEST_VECTOR if table.alignment % LONGEST_VECTOR == 0 else 1, TILE=TILE,
        BLOCK=READ_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return sum_tiles(table, partial)


def sum_tiles(table: PieceTable, partial: torch.Tensor) -> torch.Tensor:
    """From the digests of tiles ``[tensors, T, 2]`` to those of pieces, ``[tensors, P, 2]``."""
    count, num_tiles = partial.shape[:2]
    out = torch.zeros(count, len(table), 2, dtype=torch.int64, device=partial.device)
    if not out.numel() or not num_tiles:
        return out
    run_kernel(
        sum_tiles_kernel, (len(table), count, 2),
        partial, table.on(partial.device)[2], out, num_tiles, len(table),
        LONGEST=table.longest, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_pieces,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Wrapping sums of integers are exact in any order.",
    sources=(
        "megatron.core.ops.digest_pieces.kernels.digest_pieces",
        "megatron.core.ops.digest_pieces.definition",
        "megatron.core.ops.digest_pieces.table",
        "megatron.core.ops.direct_launch",
    ),
)
