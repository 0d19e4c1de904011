"""``digest_words`` in one launch for up to four tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.ops.digest_words.definition import GROUP, TILE
from megatron.core.ops.digest_words.kernels.digest_words import digest_words_kernel
from megatron.core.ops.digest_words.reference import check
from megatron.core.ops.registry import Guarantee, Variant

AT_ONCE = 4

_COMPILED: dict[tuple[int, bool, bool], Any] = {}
"""Kernels by device, ALIGNED and TAIL: launching one without asking which it is costs a third of the host's time."""


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
        _launch(end, out, first, (*addresses, *sizes, *ends), together % 16 == 0, tail % 4 != 0)
    return end


def _launch(programs: int, out: torch.Tensor, first: int, facts: tuple[int, ...], aligned: bool, tail: bool) -> None:
    given = (out.data_ptr() + 8 * first, out.stride(0), *facts)
    key = (out.get_device(), aligned, tail)
    kernel = _COMPILED.get(key)
    if kernel is not None:
        kernel[(programs, 1, 1)](*given, aligned, tail, TILE, GROUP)
        return
    _COMPILED[key] = digest_words_kernel[(programs,)](
        *given, ALIGNED=aligned, TAIL=tail, TILE=TILE, GROUP=GROUP, num_warps=4
    )


VARIANT = Variant(
    name="deterministic_triton",
    fn=digest_words,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Wrapping sums of integers are exact in any order.",
    sources=("megatron.core.ops.digest_words.kernels.digest_words", "megatron.core.ops.digest_words.definition"),
)
