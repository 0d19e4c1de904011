"""``embedding_grad``: a stable sort of the ids, then one Triton kernel in which every row has one writer."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.embedding_grad.kernels.embedding_grad import embedding_grad_kernel
from megatron.core.ops.launch import Launch, piece_rule, rows_of
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
    embedding_grad_kernel[(tokens, triton.cdiv(width, launch["BLOCK"]))](
        main_grad_ptr=main_grad_VH.detach(),
        dy_ptr=dy_TH,
        sorted_ptr=sorted_T,
        order_ptr=order_T,
        tokens=tokens,
        num_rows=main_grad_VH.shape[0],
        width=width,
        main_stride=main_grad_VH.stride(0),
        dy_stride=dy_TH.stride(0),
        **launch,
    )


VARIANT = Variant(
    name="deterministic_triton",
    fn=embedding_grad,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="A stable sort keeps positions in order; one program adds all tokens of a row, one after the other.",
    sources=("megatron.core.ops.embedding_grad.kernels.embedding_grad", "megatron.core.ops.launch"),
)
