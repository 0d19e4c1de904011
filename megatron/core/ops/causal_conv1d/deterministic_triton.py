"""``causal_conv1d`` as one Triton kernel each way, and a two-stage sum for the parameters' gradients."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.causal_conv1d.kernels.causal_conv1d import causal_conv1d_bwd_kernel, causal_conv1d_fwd_kernel
from megatron.core.ops.column_sum import column_sum
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, cdiv
from megatron.core.ops.registry import Guarantee, Variant

CHOICES = {"RUN": (48, 64, 72, 128, 152, 228), "BLOCK_C": (128, 256, 512), "num_warps": (1, 2, 4)}
FORWARD = Launch(
    kernel="causal_conv1d_fwd",
    rule=lambda *_: {"RUN": 64, "BLOCK_C": 256, "num_warps": 4},
    choices=CHOICES,
)
BACKWARD = Launch(
    kernel="causal_conv1d_bwd",
    rule=lambda *_: {"RUN": 152, "BLOCK_C": 512, "STAGES": 3, "num_warps": 4},
    choices={**CHOICES, "STAGES": (1, 2, 3)},
    new_bits=frozenset({"RUN"}),
)
"""RUN positions, a multiple of four, of BLOCK_C channels make a program; by channels and element size."""
MAX_WIDTH = 4


class _CausalConv1d(Node):
    @staticmethod
    def forward(ctx, x_BSC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
        batch, length, channels = x_BSC.shape
        y_BSC = torch.empty_like(x_BSC, memory_format=torch.contiguous_format)
        launch = FORWARD.config(x_BSC.device, channels, x_BSC.element_size())
        if y_BSC.numel():
            grid = (cdiv(channels, launch["BLOCK_C"]), cdiv(length, launch["RUN"]), batch)
            run_kernel(
                causal_conv1d_fwd_kernel, grid,
                x_BSC, weight_CW, bias_C, y_BSC, length, channels, x_BSC.stride(0), x_BSC.stride(1),
                W=weight_CW.shape[1], **launch,
            )  # fmt: skip
        ctx.save_for_backward(x_BSC, weight_CW, bias_C)
        return y_BSC

    @staticmethod
    def backward(ctx, dy_BSC: torch.Tensor):
        x_BSC, weight_CW, bias_C = ctx.saved_tensors
        (batch, length, channels), width = x_BSC.shape, weight_CW.shape[1]
        dx_BSC = torch.empty_like(x_BSC, memory_format=torch.contiguous_format)
        launch = BACKWARD.config(x_BSC.device, channels, x_BSC.element_size())
        runs = cdiv(length, launch["RUN"])
        parts = x_BSC.new_empty(batch * runs, 5 * channels, dtype=torch.float32)
        if dx_BSC.numel():
            run_kernel(
                causal_conv1d_bwd_kernel, (cdiv(channels, launch["BLOCK_C"]), runs, batch),
                x_BSC, dy_BSC.contiguous(), weight_CW, bias_C, dx_BSC, parts,
                length, channels, x_BSC.stride(0), x_BSC.stride(1),
                W=width, **launch,
            )  # fmt: skip
        taps, dbias_C = column_sum(parts).split((4 * channels, channels))
        dweight_CW = taps.view(channels, 4)[:, 4 - width :]
        return dx_BSC, dweight_CW.to(weight_CW.dtype).contiguous(), dbias_C.to(bias_C.dtype)


def causal_conv1d(x_BSC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference; a slice of a wider projection is read in place.

    Raises:
        ValueError: the window is wider than 4 positions.
    """
    if weight_CW.shape[1] > MAX_WIDTH:
        raise ValueError(f"causal_conv1d takes windows of up to {MAX_WIDTH} positions, not {weight_CW.shape[1]}")
    if x_BSC.stride(2) != 1:
        x_BSC = x_BSC.contiguous()
    return _CausalConv1d.apply(x_BSC, weight_CW.contiguous(), bias_C.contiguous())


VARIANT = Variant(
    name="deterministic_triton",
    fn=causal_conv1d,
    guarantee={"cuda": Guarantee.BATCH},
    why="Elementwise tap by tap; parameter gradients of a fixed split of the positions, added in program order.",
    sources=(
        "megatron.core.ops.causal_conv1d.kernels.causal_conv1d",
        "megatron.core.ops.column_sum",
        "megatron.core.ops.device_functions",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
