"""``causal_conv1d`` with an explicit backward that keeps only the input."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megatron.core.contracts.node import Node
from megatron.core.ops.elementwise import sigmoid
from megatron.core.ops.registry import Guarantee, Variant


def _convolved(padded: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """The convolution before its SiLU; ``padded`` starts with W - 1 zeros."""
    length = padded.shape[1] - weight_CW.shape[1] + 1
    total_BSC = bias_C.expand(padded.shape[0], length, -1).clone()
    for tap, weight_C in enumerate(weight_CW.unbind(1)):
        total_BSC.add_(padded[:, tap : tap + length] * weight_C)
    return total_BSC


class _CausalConv1d(Node):
    @staticmethod
    def forward(ctx, x_BSC, weight_CW, bias_C):
        ctx.save_for_backward(x_BSC, weight_CW, bias_C)
        padded = pad(x_BSC.float(), (0, 0, weight_CW.shape[1] - 1, 0))
        total_BSC = _convolved(padded, weight_CW.float(), bias_C.float())
        return total_BSC.mul_(sigmoid(total_BSC)).to(x_BSC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BSC):
        x_BSC, weight_CW, bias_C = ctx.saved_tensors
        length, width = x_BSC.shape[1], weight_CW.shape[1]
        padded = pad(x_BSC.float(), (0, 0, width - 1, 0))
        total_BSC = _convolved(padded, weight_CW.float(), bias_C.float())
        gate = sigmoid(total_BSC)
        dtotal_BSC = total_BSC.mul_(gate).mul_(1.0 - gate).add_(gate).mul_(dy_BSC)
        taps = weight_CW.float().unbind(1)
        dweight = [(dtotal_BSC * padded[:, w : w + length]).flatten(0, 1).sum(dim=0) for w in range(width)]
        # Position s reached s + W - 1 - w through tap w; gradients past the end are zero.
        late = pad(dtotal_BSC, (0, 0, 0, width - 1))
        dx_BSC = torch.zeros_like(dtotal_BSC)
        for tap, weight_C in enumerate(taps):
            start = width - 1 - tap
            dx_BSC.add_(late[:, start : start + length] * weight_C)
        dbias_C = dtotal_BSC.flatten(0, 1).sum(dim=0).to(bias_C.dtype)
        return dx_BSC.to(x_BSC.dtype), torch.stack(dweight, dim=1).to(weight_CW.dtype), dbias_C


def causal_conv1d(x_BSC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    return _CausalConv1d.apply(x_BSC.contiguous(), weight_CW, bias_C)


VARIANT = Variant(
    name="deterministic",
    fn=causal_conv1d,
    guarantee={"cpu": Guarantee.BATCH, "cuda": Guarantee.BATCH},
    why="Elementwise, taps ascending in both directions; only the parameter gradients reduce, over fixed shapes.",
    sources=("megatron.core.ops.elementwise",),
)
