"""The definition of ``router_table``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant


def router_table(ids_Tk: torch.Tensor, num_experts: int, value_Tk: torch.Tensor | None = None) -> torch.Tensor:
    """``[T, num_experts]`` with the value of each choice at the place of its expert and zeros elsewhere; booleans,
    True where chosen, without values. A row's ids differ. No gradient flows."""
    given_Tk = torch.ones_like(ids_Tk, dtype=torch.bool) if value_Tk is None else value_Tk.detach()
    return given_Tk.new_zeros(ids_Tk.shape[0], num_experts).scatter_(1, ids_Tk, given_Tk)


VARIANT = Variant(
    name="reference",
    fn=router_table,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Copies; no place is written twice.",
)
