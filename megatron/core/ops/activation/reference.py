"""The definition of ``activation``."""

from __future__ import annotations

import torch

from megatron.core.ops.elementwise import gelu, gelu_tanh, silu
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def apply_kind(wide_RF: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation alone, in the type of its argument.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind == "squared_relu":
        return wide_RF.relu().square()
    if kind == "swiglu":
        gate_RF, up_RF = wide_RF.chunk(2, dim=-1)
        return silu(gate_RF) * up_RF
    if kind == "gelu":
        return gelu(wide_RF)
    if kind == "gelu_tanh":
        return gelu_tanh(wide_RF)
    raise ValueError(f"unknown activation {kind!r}")


def activation(x_RF: torch.Tensor, kind: str, weight_R: torch.Tensor | None) -> torch.Tensor:
    """Activation of every element, times the row's weight in fp32, rounded once to the type of ``x_RF``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    out_RF = apply_kind(widen(x_RF), kind)
    if weight_R is not None:
        out_RF = out_RF * widen(weight_R).unsqueeze(-1)
    return out_RF.to(x_RF.dtype)


VARIANT = Variant(
    name="reference",
    fn=activation,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="Elementwise, except the weight's gradient: torch's row sum, whose order may depend on the number of rows.",
    sources=("megatron.core.ops.elementwise",),
)
