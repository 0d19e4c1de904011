"""The definition of ``adam_step``."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_step.scalars import AdamScalars
from megatron.core.ops.registry import Guarantee, Variant


def adam_step(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: AdamScalars
) -> None:
    """One AdamW step in place. Scalars are computed in fp64 and rounded once to the tensors' type.

    Only plain products, sums, roots and quotients are used: torch's combined forms (``alpha=``, ``addcmul``, ``lerp``)
    fuse the multiplication on some paths and not on others, so that bits would depend on where a buffer is cut.
    """
    with torch.no_grad():
        g = grad * scalars.clip_factor
        exp_avg.mul_(scalars.beta1).add_(g * (1.0 - scalars.beta1))
        exp_avg_sq.mul_(scalars.beta2).add_(g.square_().mul_(1.0 - scalars.beta2))
        root = exp_avg_sq.sqrt().div_(scalars.root_correction).add_(scalars.eps)
        update = (exp_avg * scalars.step_size).div_(root)
        param.mul_(scalars.decay).sub_(update)


VARIANT = Variant(
    name="reference",
    fn=adam_step,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other.",
    sources=("megatron.core.ops.adam_step.scalars",),
)
