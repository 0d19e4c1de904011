"""``gated_rms_norm`` with an explicit backward that keeps only the inputs and one fp32 number per group."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.elementwise import sigmoid
from megatron.core.ops.registry import Guarantee, Variant


class _GatedRMSNorm(Node):
    @staticmethod
    def forward(ctx, y_BSX, z_BSX, weight_X, group_size, eps):
        z = z_BSX.float()
        gated = (z * sigmoid(z)).mul_(y_BSX).unflatten(-1, (-1, group_size))
        scale = torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(y_BSX, z_BSX, weight_X, scale)
        return gated.mul_(scale).flatten(-2).mul_(weight_X).to(y_BSX.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_BSX):
        y_BSX, z_BSX, weight_X, scale = ctx.saved_tensors
        groups = (-1, z_BSX.shape[-1] // scale.shape[-2])
        y, z, dout = y_BSX.float(), z_BSX.float(), dout_BSX.float()
        gate = sigmoid(z)
        silu = z * gate
        normal = (y * silu).unflatten(-1, groups).mul_(scale)
        dnormal = (dout * weight_X).unflatten(-1, groups)
        along = (dnormal * normal).mean(dim=-1, keepdim=True)
        dgated_BSX = dnormal.sub_(normal * along).mul_(scale).flatten(-2)
        dweight_X = normal.flatten(-2).mul_(dout).flatten(0, -2).sum(dim=0).to(weight_X.dtype)
        slope = gate + silu * (1.0 - gate)
        dy_BSX, dz_BSX = dgated_BSX * silu, dgated_BSX.mul_(y).mul_(slope)
        return dy_BSX.to(y_BSX.dtype), dz_BSX.to(z_BSX.dtype), dweight_X, None, None


def gated_rms_norm(
    y_BSX: torch.Tensor, z_BSX: torch.Tensor, weight_X: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    """See the reference."""
    return _GatedRMSNorm.apply(y_BSX.contiguous(), z_BSX.contiguous(), weight_X, group_size, eps)


VARIANT = Variant(
    name="deterministic",
    fn=gated_rms_norm,
    guarantee={"cpu": Guarantee.BATCH, "cuda": Guarantee.RUN_TO_RUN},
    why="Torch's sums over fixed shapes, no atomics; on the CPU a group's sum does not depend on the other rows.",
    sources=("megatron.core.ops.elementwise",),
)
