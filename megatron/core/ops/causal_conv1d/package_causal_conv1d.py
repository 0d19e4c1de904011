"""``causal_conv1d`` by the CUDA kernels of the package causal-conv1d, in its default and in its deterministic mode.

The code is one; which form the backward has the package asks at each call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.causal_conv1d import deterministic
from megatron.core.ops.grouped_gemm.deterministic_torch_grouped import is_aligned
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant

WIDTHS = (2, 3, 4)


@functools.cache
def _package() -> Any:
    return importlib.import_module("causal_conv1d")


def causal_conv1d(x_BSC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference, for bf16. A slice of a wider projection is read in place where its rows start at
    multiples of 16 bytes, else it is copied; windows the package does not take run in torch."""
    if not x_BSC.numel() or weight_CW.shape[1] not in WIDTHS:
        return deterministic.causal_conv1d(x_BSC, weight_CW, bias_C)
    x_BCS = x_BSC.transpose(1, 2)
    if not is_aligned(x_BSC) or x_BSC.shape[2] % 8:
        x_BCS = x_BCS.contiguous()
    y_BCS = _package().causal_conv1d_fn(x_BCS, weight_CW.contiguous(), bias_C, activation="silu")
    return y_BCS.transpose(1, 2).contiguous()


_SOURCES = (
    "megatron.core.ops.causal_conv1d.deterministic",
    "megatron.core.ops.grouped_gemm.deterministic_torch_grouped",
    "megatron.core.ops.outside",
)

VARIANT = Variant(
    name="causal_conv1d",
    fn=causal_conv1d,
    guarantee=on_cuda_with("causal_conv1d", Guarantee.NONE),
    dtypes=frozenset({torch.bfloat16}),
    why="Atomics add the gradients of weight and bias over batch and blocks of positions.",
    sources=_SOURCES,
    outside=Outside(package="causal_conv1d", load=_package, switch="CAUSAL_CONV1D_DETERMINISTIC"),
)
DETERMINISTIC = Variant(
    name="causal_conv1d_deterministic",
    fn=causal_conv1d,
    guarantee=on_cuda_with("causal_conv1d", Guarantee.RUN_TO_RUN),
    dtypes=frozenset({torch.bfloat16}),
    why="Gradients of weight and bias have a slot per block of positions, and one sum after it.",
    sources=_SOURCES,
    outside=Outside(
        package="causal_conv1d",
        load=_package,
        at_least="1.7.0",
        switch="CAUSAL_CONV1D_DETERMINISTIC",
        deterministic=True,
    ),
)
