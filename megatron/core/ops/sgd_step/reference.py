"""The definition of ``sgd_step``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.sgd_step.scalars import SGDScalars


def sgd_step(param: torch.Tensor, grad: torch.Tensor, buffer: torch.Tensor, scalars: SGDScalars) -> None:
    """One SGD step with momentum in place; ``buffer`` starts from zeros. Scalars are rounded once to the tensors' type.

    Only plain products and sums are used: torch's combined forms (``alpha=``) fuse the multiplication on some paths and
    not on others, so that bits would depend on where a buffer is cut.
    """
    with torch.no_grad():
        step = grad * scalars.clip_factor
        if scalars.weight_decay:
            step.add_(param * scalars.weight_decay)
        buffer.mul_(scalars.momentum).add_(step)
        param.sub_(buffer * scalars.lr)


VARIANT = Variant(
    name="reference",
    fn=sgd_step,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other.",
    sources=("megatron.core.ops.sgd_step.scalars",),
)
