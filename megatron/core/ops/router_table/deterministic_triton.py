"""``router_table`` in one launch, where torch's deterministic scatter sorts its indices."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_table.kernels.router_table import router_table_kernel


def _rule(experts: int) -> Config:
    """4,096 places per program at least, where a row has fewer."""
    return {"ROWS": max(1, 4096 // power_of_two(experts)), "num_warps": 4}


LAUNCH = Launch(kernel="router_table", rule=_rule, choices={"ROWS": (1, 4, 16, 32, 64, 128), "num_warps": (1, 2, 4, 8)})


def router_table(ids_Tk: torch.Tensor, num_experts: int, value_Tk: torch.Tensor | None = None) -> torch.Tensor:
    """Same contract as the reference."""
    tokens, k = ids_Tk.shape
    dtype = torch.bool if value_Tk is None else value_Tk.dtype
    table_TE = torch.empty(tokens, num_experts, dtype=dtype, device=ids_Tk.device)
    if not table_TE.numel():
        return table_TE
    value_Tk = ids_Tk if value_Tk is None else value_Tk.detach()
    launch = LAUNCH.config(ids_Tk.device, num_experts)
    run_kernel(
        router_table_kernel, (cdiv(tokens, launch["ROWS"]),),
        ids_Tk.contiguous(), value_Tk.contiguous(), table_TE, tokens, num_experts,
        K=k, HAS_VALUE=value_Tk is not ids_Tk, BLOCK_E=power_of_two(num_experts), **launch,
    )  # fmt: skip
    return table_TE


VARIANT = Variant(
    name="deterministic_triton",
    fn=router_table,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Copies; every place of the table is written once, by one program.",
    sources=(
        "megatron.core.ops.router_table.kernels.router_table",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
