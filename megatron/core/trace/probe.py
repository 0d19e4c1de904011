"""Probe: how code that moves or adds numbers reports what it does, in a run that is traced or checked by replay.

Modules that are given a probe know nothing of recorders; other runs have no probe anywhere.
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


class BothProbes:
    """Two probes of one group, the second closer to the call."""

    def __init__(self, first: Probe, second: Probe) -> None:
        self._first, self._second = first, second

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
        """As ``Probe.around``."""

        def inner() -> Any:
            return self._second.around(kind, name, call, ins=ins, outs=outs, meta=meta, rows=rows)

        return self._first.around(kind, name, inner, ins=ins, outs=outs, meta=meta, rows=rows)

    def count(self, channel: str) -> int:
        """As ``Probe.count``, of the first. The second counts the same calls, but may start anew at other times."""
        self._second.count(channel)
        return self._first.count(channel)
