"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on flat tensors: what ``adam_pieces`` does to the elements of a
run."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_pieces.scalars import AdamScalars

_PART = {"cpu": 1 << 15, "cuda": 1 << 26}


def adamw(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: AdamScalars
) -> None:
    """One step in place on equally long tensors of one type; ``grad`` is not changed. Scalars are computed in fp64 and
    rounded once to the tensors' type.

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


def adamw_in_parts(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: AdamScalars
) -> None:
    """The same bits, because every operation is elementwise, with temporaries that stay in the cache."""
    size = _PART[param.device.type]
    parts = (t.split(size) for t in (param, grad, exp_avg, exp_avg_sq))
    for p, g, mean, square in zip(*parts, strict=True):
        adamw(p, g, mean, square, scalars)
