"""Rotary position angles."""

from __future__ import annotations

from decimal import Context

import torch

from megatron.core.config.transformer import TransformerConfig

# Far more digits than fp64 has: the result, rounded to fp64, is that of exact arithmetic.
_EXACT = Context(prec=50)


def rotary_frequencies(base: int, half: int) -> list[float]:
    """fp64 base^(-i / half) for i below ``half``, each the nearest to the exact value.

    In decimal arithmetic, because a vectorised power has other last bits on other processors.
    """
    return [float(_EXACT.power(base, _EXACT.divide(-i, half))) for i in range(half)]


def rotary_angles(config: TransformerConfig, length: int, device: torch.device) -> torch.Tensor:
    """fp32 angles ``[length, R]``: position * base^(-i / R) for the R = half of the rotated width pairs of a head.

    Computed on the host in fp64 and rounded once, so that every device behind every host has the same bits.
    """
    half = int(config.kv_channels * config.rotary_percent) // 2
    frequency = torch.tensor(rotary_frequencies(config.rotary_base, half), dtype=torch.float64, device="cpu")
    position = torch.arange(length, dtype=torch.float64, device="cpu")
    return torch.outer(position, frequency).to(torch.float32).to(device)
