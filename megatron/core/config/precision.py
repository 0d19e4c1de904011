"""Number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import trajectory


@dataclass(frozen=True, kw_only=True)
class PrecisionFields:
    """Precision part of ``TransformerConfig``. Masters, main gradients and moments are always fp32."""

    bf16: bool = trajectory(False)
    """Compute in bfloat16 with fp32 master weights; off: everything in fp32."""
    fp32_residual_connection: bool = trajectory(False)
    """Keep the residual stream in fp32 when computing in bfloat16."""
