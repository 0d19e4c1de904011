"""Multi-token prediction settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import trajectory


@dataclass(frozen=True, kw_only=True)
class MTPFields:
    """Multi-token prediction part of ``TransformerConfig``."""

    mtp_num_layers: int | None = trajectory(None)
    """Tokens predicted beyond the next one (D); default: the number of / parts of the pattern."""
    mtp_loss_scaling_factor: float = trajectory(0.1)
    """Weight of the losses of all depths together; each has this / D."""
    mtp_use_repeated_layer: bool = trajectory(False)
    """Apply the block of depth 1 at every depth instead of giving each depth its own weights."""
    mtp_hybrid_override_pattern: str | None = trajectory(None)
    """Layers of one depth, repeated --mtp-num-layers times behind the pattern; the same as / parts in the pattern."""
