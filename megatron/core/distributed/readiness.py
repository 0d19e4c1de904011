"""Readiness: when the gradients of a chunk's last backward for a logical shard are complete, bucket by bucket.

Every gradient that is added into a main gradient is announced (``ModelParameter.on_grad``). How many a parameter gets
in a backward is counted in the first one, in which no bucket leaves early; later a gradient beyond that number is an
error if its bucket has left already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.contracts.parameter import ModelParameter


@dataclass(kw_only=True, slots=True)
class Unit:
    """What leaves together: one bucket of one gradient buffer (``leaf``) of the buffer ``buffer``, with the parameters
    in it and their views of it."""

    buffer: int
    leaf: int
    bucket: int
    params: tuple[ModelParameter, ...]
    views: tuple[torch.Tensor, ...]
    missing: int = 0
    sent: bool = False
    versions: list[int] = field(default_factory=list)


class LateGradientError(RuntimeError):
    """A gradient arrived after the bucket it belongs to was sent: the sum over ranks lacks it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"gradients arrived after their bucket was sent and would be lost: {', '.join(names)}; a parameter whose "
            "uses change from one micro-batch to the next, or whose main gradient is written outside of autograd, "
            "cannot be trained with --overlap-grad-reduce"
        )


class Readiness:
    """Calls ``send(unit)`` for the units of a chunk in their order, each as soon as its gradients and those of all
    units before it are complete. Every rank of a stage runs the same backward, so all of them send in one order."""

    def __init__(self, units: Sequence[Sequence[Unit]], send: Callable[[int, Unit], None]) -> None:
        self._units, self._send = units, send
        self._of_param: list[dict[int, list[Unit]]] = [{} for _ in units]
        self._known: list[dict[int, int] | None] = [None for _ in units]
        self._seen: dict[int, int] = {}
        self._chunk: int | None = None
        self._next = 0
        for chunk, of_chunk in enumerate(units):
            for unit in of_chunk:
                for param in unit.params:
                    self._of_param[chunk].setdefault(id(param), []).append(unit)
                    param.on_grad = self._arrived

    def watch(self, chunk: int) -> None:
        """The backward that follows is the chunk's last for a logical shard."""
        self._chunk, self._next = chunk, 0
        self._seen = dict.fromkeys(self._of_param[chunk], 0)
        known = self._known[chunk]
        for unit in self._units[chunk]:
            unit.sent = False
            # A parameter that nothing used has nothing to wait for.
            unit.missing = len(unit.params) if known is None else sum(known[id(p)] > 0 for p in unit.params)

    def end(self, chunk: int) -> None:
        """That backward is over: send what is left."""
        if self._chunk == chunk:
            known = self._known[chunk]
            self._known[chunk] = {p: max(n, known[p] if known else 0) for p, n in self._seen.items()}
            self._chunk = None
        else:
            self._next = 0
        for unit in self._units[chunk][self._next :]:
            self._give(chunk, unit)

    def check_nothing_came_late(self, chunk: int) -> None:
        """Raises ``LateGradientError`` where a main gradient was written after it was sent; torch counts the writes it
        knows of."""
        late = [
            param.spec.name
            for unit in self._units[chunk]
            if unit.sent
            for param, view, version in zip(unit.params, unit.views, unit.versions, strict=True)
            if view._version != version
        ]
        if late:
            raise LateGradientError(late)
        for unit in self._units[chunk]:
            unit.sent = False

    def used(self, chunk: int) -> set[int]:
        """Identities of the parameters that the chunk's backward gave a gradient to; none before the first."""
        return {param for param, count in (self._known[chunk] or {}).items() if count}

    def _arrived(self, param: ModelParameter) -> None:
        chunk, key = self._chunk, id(param)
        if chunk is None or key not in self._seen:
            return
        known = self._known[chunk]
        self._seen[key] += 1
        if known is None or self._seen[key] < known[key]:
            return
        units = self._of_param[chunk][key]
        if self._seen[key] > known[key]:
            if any(unit.sent for unit in units):
                raise LateGradientError([param.spec.name])
            return
        for unit in units:
            unit.missing -= 1
        waiting = self._units[chunk]
        while self._next < len(waiting) and waiting[self._next].missing == 0:
            self._give(chunk, waiting[self._next])
            self._next += 1

    def _give(self, chunk: int, unit: Unit) -> None:
        self._send(chunk, unit)
        unit.sent = True
        unit.versions = [view._version for view in unit.views]
