"""``grouped_grad`` as one Triton kernel for all experts: no launch per expert, no intermediate."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.grouped_gemm.deterministic_torch_grouped import is_aligned
from megatron.core.ops.grouped_grad import deterministic_torch_addmm
from megatron.core.ops.grouped_grad.kernels.grouped_grad import grouped_grad_kernel
from megatron.core.ops.launch import Config, Launch, cdiv
from megatron.core.ops.registry import Guarantee, Variant

MANY_ROWS = 1024
"""Rows per expert, on average, from which the product and not the traffic of the main gradient sets the pace."""


def _rule(rows_each: int, *_: int) -> Config:
    """The tile does not change an element's order of additions."""
    if rows_each >= MANY_ROWS:
        return {"BLOCK_Y": 128, "BLOCK_X": 256, "BLOCK_R": 64, "TILES": 8, "num_warps": 8, "num_stages": 4}
    return {"BLOCK_Y": 128, "BLOCK_X": 128, "BLOCK_R": 64, "TILES": 8, "num_warps": 4, "num_stages": 3}


LAUNCH = Launch(
    kernel="grouped_grad",
    rule=_rule,
    choices={
        "BLOCK_Y": (64, 128, 256),
        "BLOCK_X": (64, 128, 256),
        "BLOCK_R": (32, 64, 128),
        "TILES": (4, 8, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    new_bits=frozenset({"BLOCK_R"}),
)
"""By rows per expert and the widths of the tile's two sides."""


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Same contract as the reference, for bf16; what ``ends_E`` says is not checked, so that nobody waits.

    Rows that the copy engine does not take (their widths are not multiples of 16 bytes) go expert by expert.

    Raises:
        ValueError: there is not one end per expert, or the rows are not equally many.
    """
    experts, width_y, width_x = main_grad_EYX.shape
    if x_RX.shape[0] != dy_RY.shape[0] or ends_E.shape[0] != experts:
        raise ValueError(f"{ends_E.shape[0]} ends for {experts} experts, {x_RX.shape[0]} and {dy_RY.shape[0]} rows")
    if not x_RX.shape[0] or not main_grad_EYX.numel():
        return
    dy_RY, x_RX = dy_RY.detach(), x_RX.detach()
    if not is_aligned(dy_RY) or not is_aligned(x_RX):
        deterministic_torch_addmm.grouped_grad(main_grad_EYX, dy_RY, x_RX, ends_E)
        return
    launch = LAUNCH.config(x_RX.device, x_RX.shape[0] // experts, width_y, width_x)
    tiles = cdiv(width_y, launch["BLOCK_Y"]) * cdiv(width_x, launch["BLOCK_X"])
    run_kernel(
        grouped_grad_kernel, (tiles, experts),
        main_grad_EYX.detach(), TensorDescriptor.from_tensor(dy_RY, [launch["BLOCK_R"], launch["BLOCK_Y"]]),
        TensorDescriptor.from_tensor(x_RX, [launch["BLOCK_R"], launch["BLOCK_X"]]), ends_E, width_y, width_x,
        main_grad_EYX.stride(0), main_grad_EYX.stride(1),
        **launch,
    )  # fmt: skip


VARIANT = Variant(
    name="deterministic_triton",
    fn=grouped_grad,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    dtypes=frozenset({torch.bfloat16}),
    why="One program adds all rows of an expert to its tile, in order, and is the only one to write it.",
    sources=(
        "megatron.core.ops.grouped_grad.kernels.grouped_grad",
        "megatron.core.ops.grouped_grad.deterministic_torch_addmm",
        "megatron.core.ops.grouped_gemm.deterministic_torch_grouped",
        "megatron.core.ops.linear_grad.deterministic_torch_addmm",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
