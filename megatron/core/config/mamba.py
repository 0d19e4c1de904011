"""Mamba-2 mixer settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import trajectory

CONV_WIDTH = 4
"""Taps of the causal convolution; fixed, as in Megatron."""
CHUNK_SIZE = 128
"""Positions per chunk of the state-space scan; fixed, as in Megatron."""
GATED_NORM_EPSILON = 1e-5
"""Epsilon of the gated norm; fixed, as in Megatron, whatever --norm-epsilon says."""
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4
"""Range the initial time steps are drawn from, and their floor."""
A_MIN, A_MAX = 1.0, 16.0
"""Range the initial decay rates are drawn from."""


@dataclass(frozen=True, kw_only=True)
class MambaFields:
    """Mamba part of ``TransformerConfig``."""

    mamba_num_heads: int | None = trajectory(None)
    """Heads of the mixer; default: 2 * hidden size / head width. Groups and tensor-parallel size divide it."""
    mamba_head_dim: int = trajectory(64)
    """Width of one mixer head."""
    mamba_state_dim: int = trajectory(128)
    """State elements per head channel."""
    mamba_num_groups: int = trajectory(8)
    """Groups of heads that share B and C; the tensor-parallel size divides it."""
