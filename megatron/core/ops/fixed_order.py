"""Running sums whose order of additions is the same on every device."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def prefix_sum(x: torch.Tensor) -> torch.Tensor:
    """Inclusive running sum over the last dimension.

    By doubling (Hillis and Steele, CACM 29:12, 1986): each round adds the value 1, 2, 4, ... places before. Elementwise
    additions, so the order is fixed and autograd's backward is elementwise too; torch's own ``cumsum`` promises no
    order on CUDA.
    """
    step = 1
    while step < x.shape[-1]:
        x = x + pad(x[..., :-step], (step, 0))
        step *= 2
    return x
