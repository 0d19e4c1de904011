"""``adam_pieces`` as one Triton kernel over the tiles of all pieces."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_pieces.kernels.adam_pieces import adam_tiles_kernel
from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.digest_pieces.deterministic_triton import sum_tiles
from megatron.core.ops.digest_pieces.table import TILE
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.registry import Guarantee, Variant

BLOCK = 512
VECTOR = 4
"""Elements of one memory access, where all offsets and lengths are multiples of it."""


def adam_pieces(
    plan: UpdatePlan,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    *,
    scalars: AdamScalars,
    digest: bool,
    digest_grad: bool = False,
) -> torch.Tensor:
    """Same contract as the reference, except that padding between pieces is left alone.

    Raises:
        ValueError: a tensor of the state or the gradient is not contiguous fp32.
    """
    for flat in (param, exp_avg, exp_avg_sq, grad):
        if flat.dtype != torch.float32 or not flat.is_contiguous():
            raise ValueError(f"adam_pieces takes contiguous fp32 state and gradients, not {flat.dtype}")
    facts, tiles, _ = plan.table.on(grad.device)
    num_tiles = tiles.shape[0]
    num_digests = 4 + digest_grad if digest else 0
    partial = grad.new_empty(num_digests, num_tiles, 2, dtype=torch.int64)
    if num_tiles:
        run_kernel(
            adam_tiles_kernel, (num_tiles,),
            param, exp_avg, exp_avg_sq, grad, weights, facts, plan.on(grad.device), tiles,
            partial if digest else tiles, num_tiles, float(scalars.clip_factor),
            scalars.beta1, 1.0 - scalars.beta1, scalars.beta2, 1.0 - scalars.beta2,
            scalars.root_correction, scalars.eps, scalars.step_size, scalars.decay,
            DIGESTS=num_digests, ALIGNED=VECTOR if plan.alignment % VECTOR == 0 else 1, TILE=TILE, BLOCK=BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return sum_tiles(plan.table, partial)


VARIANT = Variant(
    name="deterministic_triton",
    fn=adam_pieces,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other, fused multiply-add is off; digests are integer sums.",
    sources=(
        "megatron.core.ops.adam_pieces.kernels.adam_pieces",
        "megatron.core.ops.adam_pieces.plan",
        "megatron.core.ops.adam_pieces.scalars",
        "megatron.core.ops.digest_pieces.kernels.digest_pieces",
        "megatron.core.ops.digest_pieces.deterministic_triton",
        "megatron.core.ops.digest_pieces.definition",
        "megatron.core.ops.digest_pieces.table",
        "megatron.core.ops.direct_launch",
    ),
)
