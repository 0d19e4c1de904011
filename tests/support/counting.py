"""A probe that counts collectives and the elements that ranks put into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.trace.flatten import named_tensors

Counted = dict[str, tuple[int, int]]
"""By "axis name": calls, and elements this rank gave."""


class CountingProbe:
    """Told of every collective of groups with several members; ``taken`` is what came since it was asked last."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._elements: Counter[str] = Counter()

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
        key = f"{(meta or {})['axis']} {name}"
        self._calls[key] += 1
        self._elements[key] += sum(tensor.numel() for _, tensor in named_tensors(ins, ""))
        return call()

    def count(self, channel: str) -> int:
        """As ``Probe.count``; nobody reads it here."""
        return 0

    def taken(self) -> Counted:
        """All that was counted; it starts anew."""
        counted = {key: (calls, self._elements[key]) for key, calls in sorted(self._calls.items())}
        self._calls.clear()
        self._elements.clear()
        return counted
