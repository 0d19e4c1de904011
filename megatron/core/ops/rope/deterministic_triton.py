"""``rope`` as one Triton kernel, used both ways; sines and cosines are torch's."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.rope.kernels.rope import rope_kernel


def _rule(heads: int, width: int) -> Config:
    """As many heads of a position as make 2,048 elements."""
    return {"HEADS": max(1, min(power_of_two(heads), 2048 // power_of_two(width))), "num_warps": 4}


LAUNCH = Launch(kernel="rope", rule=_rule, choices={"HEADS": (1, 2, 4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8)})


def _turn(x_SBND: torch.Tensor, cos_SBR: torch.Tensor, sin_SBR: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    length, batch, heads, width = x_SBND.shape
    if x_SBND.stride(-1) != 1:
        x_SBND = x_SBND.contiguous()
    half = cos_SBR.shape[-1]
    out_SBND = torch.empty_like(x_SBND, memory_format=torch.contiguous_format)
    if not out_SBND.numel():
        return out_SBND
    launch = LAUNCH.config(x_SBND.device, heads, width)
    rest = width - 2 * half
    run_kernel(
        rope_kernel, (length * batch, cdiv(heads, launch["HEADS"])),
        x_SBND, cos_SBR, sin_SBR, out_SBND, heads, width, half, batch, *x_SBND.stride()[:3],
        INVERSE=inverse, BLOCK_R=power_of_two(half) if half else 0, BLOCK_D=power_of_two(rest) if rest else 0,
        **launch,
    )  # fmt: skip
    return out_SBND


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBND: torch.Tensor, cos_SBR: torch.Tensor, sin_SBR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_SBR, sin_SBR)
        return _turn(x_SBND, cos_SBR, sin_SBR, inverse=False)

    @staticmethod
    def backward(ctx, dout_SBND: torch.Tensor):
        cos_SBR, sin_SBR = ctx.saved_tensors
        return _turn(dout_SBND, cos_SBR, sin_SBR, inverse=True), None, None


def rope(x_SBND: torch.Tensor, angle_SBR: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference."""
    angle_SBR = angle_SBR.detach().float().expand(*x_SBND.shape[:2], -1).contiguous()
    return _Rope.apply(x_SBND, angle_SBR.cos(), angle_SBR.sin())


VARIANT = Variant(
    name="deterministic_triton",
    fn=rope,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise.",
    sources=("megatron.core.ops.rope.kernels.rope", "megatron.core.ops.direct_launch", "megatron.core.ops.launch"),
)
