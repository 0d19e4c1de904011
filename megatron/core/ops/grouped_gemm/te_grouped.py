"""``grouped_gemm`` by the grouped product behind Transformer Engine's ``GroupedLinear``: one cuBLAS product per expert,
spread over streams that each have a workspace of their own."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.grouped_gemm import deterministic_torch_grouped
from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant

WIDTH_UNIT = 8
"""Widths it is given are multiples of that many elements; others run expert by expert in torch."""


@functools.cache
def _package() -> Any:
    # Before torch's first call of cuDNN: later two builds of cuDNN are mixed.
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions")


def grouped_gemm(
    x_RX: torch.Tensor, weight_EYX: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Same contract as the reference, for bf16; the counts are read on the host, which waits for the device.

    Raises:
        ValueError: the ends do not fit the rows or the experts.
    """
    if not x_RX.shape[0] or any(width % WIDTH_UNIT for width in weight_EYX.shape[1:]):
        return deterministic_torch_grouped.grouped_gemm(x_RX, weight_EYX, ends_E, transposed=transposed)
    counts = counts_of(ends_E, x_RX.shape[0], weight_EYX.shape[0])
    busy = [expert for expert, count in enumerate(counts) if count]
    rows = [count for count in counts if count]
    with torch.no_grad():
        out_RY = x_RX.new_empty(x_RX.shape[0], weight_EYX.shape[2 if transposed else 1])
        _package().general_grouped_gemm(
            [weight_EYX[expert].detach() for expert in busy],
            list(x_RX.detach().contiguous().split(rows)),
            [out_RY],
            [None] * len(busy),
            x_RX.dtype,
            layout="NN" if transposed else "TN",
            m_splits=rows,
            single_output=True,
        )
    return out_RY


VARIANT = Variant(
    name="te_grouped",
    fn=grouped_gemm,
    guarantee=on_cuda_with("transformer_engine", Guarantee.RUN_TO_RUN),
    dtypes=frozenset({torch.bfloat16}),
    why="One cuBLAS product per expert of fixed shape; streams have workspaces of their own. Its mode does not matter.",
    sources=(
        "megatron.core.ops.grouped_gemm.deterministic_torch_grouped",
        "megatron.core.ops.grouped_gemm.reference",
        "megatron.core.ops.outside",
    ),
    outside=Outside(package="transformer_engine", load=_package, at_least="2.20.2"),
)
