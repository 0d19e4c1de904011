"""The type an op computes in."""

from __future__ import annotations

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the type arithmetic is done in: fp32, or fp64 where ``x`` is fp64 (the tests' yardstick)."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
