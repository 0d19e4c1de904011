"""What a run promises about its bits, and the ops it may use to keep the promise."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import operational, trajectory


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Determinism settings."""

    deterministic_mode: bool = trajectory(False)
    """Same bits on every run of the same recipe and logical layout; refuses what cannot promise it."""
    op_variants: str | None = trajectory(None)
    """Override the choice of ops: "op=variant,..." or "fastest"; the manifest then says what is still promised."""
    determinism_allow_env: str | None = operational(None)
    """Comma-separated environment variables whose launcher-set values are accepted as they are and recorded."""
