"""The definition of ``activation``."""

from __future__ import annotations

import torch

from megatron.core.ops.elementwise import gelu, gelu_tanh, silu
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def activation(x_RF: torch.Tensor, kind: str, weight_R: torch.Tensor | None) -> torch.Tensor:
    """Activation of every element, times the row's weight in fp32, rounded once to the type of ``x_RF``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    wide_RF = widen(x_RF)
    if kind == "squared_relu":
        out_RF = wide_RF.relu().square()
    elif kind == "swiglu":
        gate_RF, up_RF = wide_RF.chunk(2, dim=-1)
        out_RF = silu(gate_RF) * up_RF
    elif kind in ("gelu", "gelu_tanh"):
        out_RF = gelu_tanh(wide_RF) if kind == "gelu_tanh" else gelu(wide_RF)
    else:
        raise ValueError(f"unknown activation {kind!r}")
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
