"""``embedding_grad``: a stable sort of the ids, then one Triton kernel in which every row has one writer."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.embedding_grad.kernels.embedding_grad import embedding_grad_kernel
from megatron.core.ops.launch import Launch, cdiv, piece_rule, rows_of
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="embedding_grad",
    rule=piece_rule(1024, per_warp=256, max_warps=4),
    choices={"BLOCK": (256, 512, 1024, 2048), "num_warps": (1, 2, 4)},
)


def embedding_grad(main_grad_VH: torch.Tensor, dy_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
    """Same contract as the reference."""
    dy_TH = rows_of(dy_TH.detach())
    tokens, width = dy_TH.shape
    if not tokens or not width:
        return
    sorted_T, order_T = torch.sort(ids_T, stable=True)
    launch = LAUNCH.config(dy_TH.device, width)
    run_kernel(
        embedding_grad_kernel, (tokens, cdiv(width, launch["BLOCK"])),
        main_grad_VH.detach(), dy_TH, sorted_T, order_T, tokens, main_grad_VH.shape[0], width, main_grad_VH.stride(0),
        dy_TH.stride(0),
        **launch,
    )  # fmt: skip


VARIANT = Variant(
    name="deterministic_triton",
    fn=embedding_grad,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="A stable sort keeps positions in order; one program adds all tokens of a row, one after the other.",
    sources=(
        "megatron.core.ops.embedding_grad.kernels.embedding_grad",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
