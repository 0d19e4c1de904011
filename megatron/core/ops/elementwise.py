"""Non-linear functions whose bits depend on the element alone.

On the CPU torch's ``sigmoid``, ``silu``, ``softplus`` and ``gelu`` use another routine for the last few elements of a
piece of memory than for the rest, so that a value's bits depend on where a tensor is cut. ``exp``, ``log1p``, ``erf``
and ``tanh`` do not; these functions are made of them. They take fp32 or fp64 and
differentiate through autograd.
"""

from __future__ import annotations

import math

import torch


def _falling_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(-|x|), which never overflows; its derivative at 0 is that of the right side."""
    return torch.where(x >= 0, -x, x).exp()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    e = _falling_exp(x)
    return torch.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x))."""
    return torch.where(x >= 0, x, 0.0) + torch.log1p(_falling_exp(x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the normal distribution function (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The same paper's approximation by tanh."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return x * 0.5 * (1.0 + torch.tanh(inner))
