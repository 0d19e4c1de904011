"""``digest_rows`` in one launch."""

from __future__ import annotations

import torch

from megatron.core.ops.digest_rows.kernels.digest_rows import digest_rows_kernel
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant

TILE, WIDEST = 2048, 512


def digest_rows(words_RK: torch.Tensor, length: int, splits: int, out: torch.Tensor, first: int) -> None:
    """Same contract as the reference."""
    rows, width = words_RK.shape
    part, parts = cdiv(length, splits), cdiv(rows, length) * splits
    if not parts:
        return
    flat_RK = words_RK.contiguous()
    address = flat_RK.data_ptr()
    aligned = address % 16 == 0 and width % 4 == 0
    words = min(WIDEST, power_of_two(width))
    tile_rows = min(TILE // words, power_of_two(part))
    columns = width // 4 if aligned else width
    run_kernel(
        digest_rows_kernel, (parts,),
        address, out.data_ptr() + 8 * first, out.stride(0), rows, columns, length, part, splits,
        ALIGNED=aligned, ROWS=tile_rows, WORDS=words, num_warps=4,
    )  # fmt: skip


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_rows,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=(
        "megatron.core.ops.digest_rows.kernels.digest_rows",
        "megatron.core.ops.digest_words.kernels.digest_words",
        "megatron.core.ops.digest_words.definition",
        "megatron.core.ops.direct_launch",
    ),
)
