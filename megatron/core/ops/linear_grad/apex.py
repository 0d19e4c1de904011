"""``linear_grad`` by apex's fused weight gradient, a module of its own that only builds of apex with CUDA have."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant


@functools.cache
def _package() -> Any:
    return importlib.import_module("fused_weight_gradient_mlp_cuda")


def linear_grad(main_grad_YX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor) -> None:
    """Same contract as the reference, for bf16."""
    if not x_RX.shape[0] or not main_grad_YX.numel():
        return
    with torch.no_grad():
        _package().wgrad_gemm_accum_fp32(x_RX.detach().contiguous(), dy_RY.detach().contiguous(), main_grad_YX)


VARIANT = Variant(
    name="apex",
    fn=linear_grad,
    guarantee=on_cuda_with("fused_weight_gradient_mlp_cuda", Guarantee.NONE),
    dtypes=frozenset({torch.bfloat16}),
    why="One cuBLAS product that starts from the main gradient; not shown, as no build of apex was at hand.",
    sources=("megatron.core.ops.outside",),
    outside=Outside(package="fused_weight_gradient_mlp_cuda", load=_package),
)
