"""What a run promises about its bits, and the ops it may use to keep the promise."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.fields import operational, trajectory

FASTEST = "fastest"
FLOAT_SUMS = "float_sums"
ORDERED, NATIVE = "ordered", "native"


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Determinism settings."""

    deterministic_mode: bool = trajectory(False)
    """Same bits on every run of the same recipe and logical layout; refuses what cannot promise it."""
    op_variants: str | None = trajectory(None)
    """Override the choice of ops: "op=variant,...", where a variant may be "fastest", or "fastest" for all of them and
    the backend's sums over ranks ("float_sums=native" or "ordered" chooses those alone); the manifest then says what is
    still promised."""
    determinism_allow_env: str | None = operational(None)
    """Comma-separated environment variables whose launcher-set values are accepted as they are and recorded."""

    @property
    def allowed_environment(self) -> tuple[str, ...]:
        """Names of the variables whose values are accepted as they are."""
        return tuple(name.strip() for name in (self.determinism_allow_env or "").split(",") if name.strip())

    @property
    def native_sums(self) -> bool:
        """Whether floating-point sums over ranks are left to the backend, in an order nobody states: asked for by
        name, or as part of the fastest of everything."""
        words = (self.op_variants or "").split(",")
        chosen = [word for word in words if word.startswith(f"{FLOAT_SUMS}=")]
        return chosen[-1] == f"{FLOAT_SUMS}={NATIVE}" if chosen else FASTEST in words
