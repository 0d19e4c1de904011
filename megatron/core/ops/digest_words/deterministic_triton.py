"""``digest_words`` in one launch."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.digest_words.definition import TILE
from megatron.core.ops.digest_words.kernels.digest_words import digest_words_kernel
from megatron.core.ops.launch import power_of_two
from megatron.core.ops.registry import Guarantee, Variant


def digest_words(raw: torch.Tensor, slots: int) -> torch.Tensor:
    """Same contract as the reference."""
    num_bytes = raw.numel()
    if num_bytes and raw.data_ptr() % 8:
        raise ValueError("digest_words takes bytes that start at a multiple of 8")
    out = torch.empty(2, slots, dtype=torch.int64, device=raw.device)
    # A power of two, so that few kernels are compiled.
    rounds = power_of_two(triton.cdiv(num_bytes, 8 * TILE * slots))
    digest_words_kernel[(slots,)](
        raw_ptr=raw,
        out_ptr=out,
        num_bytes=num_bytes,
        slots=slots,
        ROUNDS=rounds,
        TAIL=num_bytes % 8 != 0,
        TILE=TILE,
        num_warps=4,
    )
    return out


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_words,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.kernels.digest_words", "megatron.core.ops.digest_words.definition"),
)
