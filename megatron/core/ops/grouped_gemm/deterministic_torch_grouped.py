"""``grouped_gemm`` as one ``torch._grouped_mm``, and as one product per expert where its alignment does not fit."""

from __future__ import annotations

import torch

from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.registry import Guarantee, Variant

ALIGNED_BYTES = 16
"""Rows and bases that the grouped kernel's copy engine takes."""


def is_aligned(x: torch.Tensor) -> bool:
    """Whether base and every stride but the last (1) are multiples of 16 bytes."""
    places = (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1]))
    return x.stride(-1) == 1 and all(place % ALIGNED_BYTES == 0 for place in places)


def grouped_gemm(
    x_RX: torch.Tensor, weight_EYX: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Same contract as the reference, for bf16; where the grouped kernel takes the widths, what ``ends_E`` says is not
    checked, so that nobody waits.

    Raises:
        ValueError: there is not one end per expert.
    """
    if ends_E.shape[0] != weight_EYX.shape[0]:
        raise ValueError(f"{ends_E.shape[0]} ends for {weight_EYX.shape[0]} experts")
    with torch.no_grad():
        x_RX = x_RX if x_RX.stride(-1) == 1 else x_RX.contiguous()
        weight = weight_EYX if transposed else weight_EYX.transpose(1, 2)
        if not x_RX.shape[0]:
            return x_RX.new_empty(0, weight.shape[2])
        fits = weight.shape[1] * x_RX.element_size() % ALIGNED_BYTES == 0
        if fits and weight.shape[2] * x_RX.element_size() % ALIGNED_BYTES == 0 and is_aligned(weight_EYX):
            x_RX = x_RX if is_aligned(x_RX) else x_RX.clone(memory_format=torch.contiguous_format)
            return torch._grouped_mm(x_RX, weight, offs=ends_E)
        counts = counts_of(ends_E, x_RX.shape[0], weight_EYX.shape[0])
        out_RY = x_RX.new_empty(x_RX.shape[0], weight.shape[2])
        for group, out, x in zip(weight, out_RY.split(counts), x_RX.split(counts), strict=True):
            if x.shape[0]:
                torch.mm(x, group, out=out)
    return out_RY


VARIANT = Variant(
    name="deterministic_torch_grouped",
    fn=grouped_gemm,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    dtypes=frozenset({torch.bfloat16}),
    why="CUTLASS grouped tiles without split-K: one writer per tile; elsewhere one BLAS product per expert.",
    sources=("megatron.core.ops.grouped_gemm.reference",),
)
