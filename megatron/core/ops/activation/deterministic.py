"""``activation`` with an explicit backward that keeps only the input."""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.activation.reference import apply_kind
from megatron.core.ops.elementwise import sigmoid
from megatron.core.ops.registry import Guarantee, Variant


def _swiglu_grad(x_RF: torch.Tensor, dout_RF: torch.Tensor) -> torch.Tensor:
    x_gate, x_up = x_RF.chunk(2, dim=-1)
    gate = sigmoid(x_gate)
    silu = x_gate * gate
    slope = gate + silu * (1.0 - gate)
    return torch.cat((dout_RF * x_up * slope, dout_RF * silu), dim=-1)


def _gelu_grad(x_RF: torch.Tensor, dout_RF: torch.Tensor) -> torch.Tensor:
    density = torch.exp(x_RF.square() * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return (0.5 * (1.0 + torch.erf(x_RF * math.sqrt(0.5))) + x_RF * density) * dout_RF


def _gelu_tanh_grad(x_RF: torch.Tensor, dout_RF: torch.Tensor) -> torch.Tensor:
    root, square = math.sqrt(2.0 / math.pi), x_RF.square()
    tanh = torch.tanh(root * x_RF * (1.0 + 0.044715 * square))
    slope = (1.0 - tanh.square()) * (root * (1.0 + 3.0 * 0.044715 * square))
    return (0.5 * (1.0 + tanh) + 0.5 * x_RF * slope) * dout_RF


def _squared_relu_grad(x_RF: torch.Tensor, dout_RF: torch.Tensor) -> torch.Tensor:
    return x_RF.relu() * 2.0 * dout_RF


_GRADS = {
    "squared_relu": _squared_relu_grad,
    "swiglu": _swiglu_grad,
    "gelu": _gelu_grad,
    "gelu_tanh": _gelu_tanh_grad,
}


class _Activation(Node):
    @staticmethod
    def forward(ctx, x_RF, kind, weight_R):
        ctx.save_for_backward(x_RF, weight_R)
        ctx.kind = kind
        out_RF = apply_kind(x_RF.float(), kind)
        if weight_R is not None:
            out_RF = out_RF.mul_(weight_R.unsqueeze(-1))
        return out_RF.to(x_RF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RF):
        x_RF, weight_R = ctx.saved_tensors
        wide_RF, dout_RF, dweight_R = x_RF.float(), dy_RF.float(), None
        if weight_R is not None:
            if ctx.needs_input_grad[2]:
                dweight_R = (apply_kind(wide_RF, ctx.kind) * dout_RF).sum(dim=-1).to(weight_R.dtype)
            dout_RF = dout_RF * weight_R.unsqueeze(-1)
        return _GRADS[ctx.kind](wide_RF, dout_RF).to(x_RF.dtype), None, dweight_R


def activation(x_RF: torch.Tensor, kind: str, weight_R: torch.Tensor | None) -> torch.Tensor:
    """See the reference."""
    return _Activation.apply(x_RF.contiguous(), kind, weight_R)


VARIANT = Variant(
    name="deterministic",
    fn=activation,
    guarantee={"cpu": Guarantee.BATCH, "cuda": Guarantee.RUN_TO_RUN},
    why="Elementwise, except the weight's gradient: torch's row sum, which on the CPU does not depend on other rows.",
    sources=("megatron.core.ops.activation.reference", "megatron.core.ops.elementwise"),
)
