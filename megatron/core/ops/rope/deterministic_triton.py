"""``rope`` as one Triton kernel, used both ways, that makes sines and cosines from the angles."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.rope.kernels.rope import rope_kernel


def _rule(heads: int, width: int) -> Config:
    """As many heads of a position as make 4,096 elements, 1,024 to a warp."""
    tile = max(1, min(power_of_two(heads), 4096 // power_of_two(width)))
    return {"HEADS": tile, "num_warps": min(4, max(1, tile * power_of_two(width) // 1024))}


LAUNCH = Launch(kernel="rope", rule=_rule, choices={"HEADS": (1, 2, 4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8)})


def _turn(x_SBND: torch.Tensor, angle_SBR: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    length, batch, heads, width = x_SBND.shape
    if x_SBND.stride(-1) != 1:
        x_SBND = x_SBND.contiguous()
    half = angle_SBR.shape[-1]
    out_SBND = torch.empty_like(x_SBND, memory_format=torch.contiguous_format)
    if not out_SBND.numel():
        return out_SBND
    launch = LAUNCH.config(x_SBND.device, heads, width)
    rest = width - 2 * half
    run_kernel(
        rope_kernel, (length * batch, cdiv(heads, launch["HEADS"])),
        x_SBND, angle_SBR, out_SBND, heads, width, half, batch, *x_SBND.stride()[:3],
        INVERSE=inverse, BLOCK_R=power_of_two(half) if half else 0, BLOCK_D=power_of_two(rest) if rest else 0,
        **launch,
    )  # fmt: skip
    return out_SBND


class _Rope(Node):
    @staticmethod
    def forward(ctx, x_SBND: torch.Tensor, angle_SBR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(angle_SBR)
        return _turn(x_SBND, angle_SBR, inverse=False)

    @staticmethod
    def backward(ctx, dout_SBND: torch.Tensor):
        (angle_SBR,) = ctx.saved_tensors
        return _turn(dout_SBND, angle_SBR, inverse=True), None


def rope(x_SBND: torch.Tensor, angle_SBR: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference."""
    return _Rope.apply(x_SBND, angle_SBR.detach().float().expand(*x_SBND.shape[:2], -1).contiguous())


VARIANT = Variant(
    name="deterministic_triton",
    fn=rope,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise.",
    sources=("megatron.core.ops.rope.kernels.rope", "megatron.core.ops.direct_launch", "megatron.core.ops.launch"),
)
