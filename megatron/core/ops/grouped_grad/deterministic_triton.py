"""``grouped_grad`` as one Triton kernel for all experts: no launch per expert, no intermediate."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.grouped_grad.kernels.grouped_grad import grouped_grad_kernel
from megatron.core.ops.launch import rows_of
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = {"BLOCK_Y": 128, "BLOCK_X": 256, "BLOCK_R": 64, "TILES": 8, "num_warps": 8, "num_stages": 4}
"""For every shape."""


def grouped_grad(main_grad_EYX: torch.Tensor, dy_RY: torch.Tensor, x_RX: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Same contract as the reference, for bf16; what ``ends_E`` says is not checked, so that nobody waits.

    Raises:
        ValueError: there is not one end per expert, or the rows are not equally many.
    """
    experts, width_y, width_x = main_grad_EYX.shape
    if x_RX.shape[0] != dy_RY.shape[0] or ends_E.shape[0] != experts:
        raise ValueError(f"{ends_E.shape[0]} ends for {experts} experts, {x_RX.shape[0]} and {dy_RY.shape[0]} rows")
    if not x_RX.shape[0] or not main_grad_EYX.numel():
        return
    dy_RY, x_RX = rows_of(dy_RY.detach()), rows_of(x_RX.detach())
    tiles = triton.cdiv(width_y, LAUNCH["BLOCK_Y"]) * triton.cdiv(width_x, LAUNCH["BLOCK_X"])
    grouped_grad_kernel[(tiles, experts)](
        main_ptr=main_grad_EYX.detach(),
        dy_ptr=dy_RY,
        x_ptr=x_RX,
        ends_ptr=ends_E,
        width_y=width_y,
        width_x=width_x,
        main_e=main_grad_EYX.stride(0),
        main_y=main_grad_EYX.stride(1),
        dy_stride=dy_RY.stride(0),
        x_stride=x_RX.stride(0),
        **LAUNCH,
    )


VARIANT = Variant(
    name="deterministic_triton",
    fn=grouped_grad,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    dtypes=frozenset({torch.bfloat16}),
    why="One program adds all rows of an expert to its tile, in order, and is the only one to write it.",
    sources=("megatron.core.ops.grouped_grad.kernels.grouped_grad", "megatron.core.ops.launch"),
)
