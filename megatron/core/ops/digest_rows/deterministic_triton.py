"""``digest_rows`` in one launch."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.digest_rows.kernels.digest_rows import digest_rows_kernel
from megatron.core.ops.launch import power_of_two
from megatron.core.ops.registry import Guarantee, Variant

TILE, WIDEST = 2048, 512


def digest_rows(words_RK: torch.Tensor, length: int, splits: int) -> torch.Tensor:
    """Same contract as the reference."""
    rows, width = words_RK.shape
    part, parts = triton.cdiv(length, splits), triton.cdiv(rows, length) * splits
    out = torch.empty(2, parts, dtype=torch.int64, device=words_RK.device)
    if not parts:
        return out
    words = min(WIDEST, power_of_two(width))
    tile_rows = min(TILE // words, power_of_two(part))
    # Powers of two, so that few kernels are compiled.
    digest_rows_kernel[(parts,)](
        words_ptr=words_RK.contiguous(),
        out_ptr=out,
        rows=rows,
        width=width,
        length=length,
        part=part,
        splits=splits,
        parts=parts,
        ROW_TURNS=power_of_two(triton.cdiv(part, tile_rows)),
        WORD_TURNS=power_of_two(triton.cdiv(width, words)),
        ROWS=tile_rows,
        WORDS=words,
        num_warps=4,
    )
    return out


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_rows,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=(
        "megatron.core.ops.digest_rows.kernels.digest_rows",
        "megatron.core.ops.digest_words.kernels.digest_words",
        "megatron.core.ops.digest_words.definition",
    ),
)
