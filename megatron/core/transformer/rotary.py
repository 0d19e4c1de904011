"""Rotary position angles."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig


def rotary_angles(config: TransformerConfig, length: int, device: torch.device) -> torch.Tensor:
    """fp32 angles ``[length, R]``: position * base^(-i / R) for the R = half of the rotated width pairs of a head.

    Computed on the host in fp64 and rounded once, so that every device has the same bits.
    """
    half = int(config.kv_channels * config.rotary_percent) // 2
    frequency = float(config.rotary_base) ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    position = torch.arange(length, dtype=torch.float64, device="cpu")
    return torch.outer(position, frequency).to(torch.float32).to(device)
