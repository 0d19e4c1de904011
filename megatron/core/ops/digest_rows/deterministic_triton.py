"""``digest_rows`` in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton

from megatron.core.ops.digest_rows.kernels.digest_rows import digest_rows_kernel
from megatron.core.ops.launch import power_of_two
from megatron.core.ops.registry import Guarantee, Variant

TILE, WIDEST = 2048, 512

_COMPILED: dict[tuple[int, bool, int, int], Any] = {}
"""Kernels by device, ALIGNED, ROWS and WORDS, to be launched without asking which it is."""


def digest_rows(words_RK: torch.Tensor, length: int, splits: int, out: torch.Tensor, first: int) -> None:
    """Same contract as the reference."""
    rows, width = words_RK.shape
    part, parts = triton.cdiv(length, splits), triton.cdiv(rows, length) * splits
    if not parts:
        return
    flat_RK = words_RK.contiguous()
    address = flat_RK.data_ptr()
    aligned = address % 16 == 0 and width % 4 == 0
    words = min(WIDEST, power_of_two(width))
    tile_rows = min(TILE // words, power_of_two(part))
    columns = width // 4 if aligned else width
    given = (address, out.data_ptr() + 8 * first, out.stride(0), rows, columns, length, part, splits)
    key = (out.get_device(), aligned, tile_rows, words)
    kernel = _COMPILED.get(key)
    if kernel is not None:
        kernel[(parts, 1, 1)](*given, aligned, tile_rows, words)
        return
    _COMPILED[key] = digest_rows_kernel[(parts,)](*given, ALIGNED=aligned, ROWS=tile_rows, WORDS=words, num_warps=4)


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
