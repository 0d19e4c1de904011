"""Probe: what code that moves or adds numbers may tell of itself, where somebody listens.

Nothing below knows a recorder; a run without a trace has no probe anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Probe(Protocol):
    """Records one call: the tensors that went in, the call, the tensors that came out."""

    def around(
        self,
        kind: str,
        name: str,
        call: Callable[[], Any],
        *,
        ins: Any,
        outs: Any = None,
        meta: Mapping[str, Any] | None = None,
        rows: bool = False,
    ) -> Any:
        """Run ``call`` and hand on what it returns.

        ``ins`` is any nesting of tensors read by it; ``outs`` what it fills in place (default: what it returns).
        ``rows`` asks for digests by row too.
        """
        ...

    def count(self, channel: str) -> int:
        """How often this was asked for ``channel`` since the step began; members of a group count alike."""
        ...
