"""``digest_words`` in one launch for up to four tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.digest_words.definition import GROUP, TILE
from megatron.core.ops.digest_words.kernels.digest_words import digest_words_kernel
from megatron.core.ops.digest_words.reference import check
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.registry import Guarantee, Variant

AT_ONCE = 4


def digest_words(tensors: Sequence[torch.Tensor], slots: Sequence[int], out: torch.Tensor, first: int) -> None:
    """Same contract as the reference."""
    for at in range(0, len(tensors), AT_ONCE):
        first += _up_to_four(tensors[at : at + AT_ONCE], slots[at : at + AT_ONCE], out, first)


def _up_to_four(tensors: Sequence[torch.Tensor], slots: Sequence[int], out: torch.Tensor, first: int) -> int:
    addresses, sizes, ends, end, together, tail = [], [], [], 0, 0, 0
    for tensor, count in zip(tensors, slots, strict=True):
        check(tensor)
        end += count
        address, size = tensor.data_ptr(), tensor.nbytes
        addresses.append(address)
        sizes.append(size)
        ends.append(end)
        together |= address
        tail |= size
    if end:
        rest = AT_ONCE - len(addresses)
        addresses, sizes, ends = addresses + [0] * rest, sizes + [0] * rest, ends + [end] * rest
        run_kernel(
            digest_words_kernel, (end,),
            out.data_ptr() + 8 * first, out.stride(0), *addresses, *sizes, *ends,
            ALIGNED=together % 16 == 0, TAIL=tail % 4 != 0, TILE=TILE, GROUP=GROUP, num_warps=4,
        )  # fmt: skip
    return end


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_words,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=(
        "megatron.core.ops.digest_words.kernels.digest_words",
        "megatron.core.ops.digest_words.definition",
        "megatron.core.ops.direct_launch",
    ),
)
