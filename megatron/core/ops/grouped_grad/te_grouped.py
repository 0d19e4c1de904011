"""``grouped_grad`` by Transformer Engine's grouped product, which adds into the fp32 main gradients itself."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.grouped_gemm.reference import counts_of
from megatron.core.ops.grouped_gemm.te_grouped import WIDTH_UNIT
from megatron.core.ops.grouped_grad import deterministic_torch_addmm
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant


@functools.cache
def _package() -> Any:
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions")


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Same contract as the reference, for bf16; the counts are read on the host, which waits for the device.

    Raises:
        ValueError: the ends do not fit the rows or the experts.
    """
    if not x_RX.shape[0] or any(width % WIDTH_UNIT for width in main_grad_EYX.shape[1:]):
        deterministic_torch_addmm.grouped_grad(main_grad_EYX, dy_RY, x_RX, ends_E)
        return
    counts = counts_of(ends_E, x_RX.shape[0], main_grad_EYX.shape[0])
    busy = [expert for expert, count in enumerate(counts) if count]
    rows = [count for count in counts if count]
    with torch.no_grad():
        _package().general_grouped_gemm(
            list(x_RX.detach().contiguous().split(rows)),
            list(dy_RY.detach().contiguous().split(rows)),
            [main_grad_EYX[expert] for expert in busy],
            [None] * len(busy),
            x_RX.dtype,
            layout="NT",
            m_splits=rows,
            grad=True,
            accumulate=True,
        )


VARIANT = Variant(
    name="te_grouped",
    fn=grouped_grad,
    guarantee=on_cuda_with("transformer_engine", Guarantee.RUN_TO_RUN),
    dtypes=frozenset({torch.bfloat16}),
    why="One cuBLAS product per expert that starts from the main gradient; streams have workspaces of their own.",
    sources=(
        "megatron.core.ops.grouped_gemm.te_grouped",
        "megatron.core.ops.grouped_gemm.reference",
        "megatron.core.ops.grouped_grad.deterministic_torch_addmm",
        "megatron.core.ops.linear_grad.deterministic_torch_addmm",
        "megatron.core.ops.outside",
    ),
    outside=Outside(package="transformer_engine", load=_package, at_least="2.20.2"),
)
