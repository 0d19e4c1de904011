"""Scopes: where a step is, also in a backward, whose nodes belong to the forward that made them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron.core.ops.rerun import Rerun, current_rerun


class _Marks:
    """Scopes that a forward entered and left, by the sequence numbers of the autograd nodes it made."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._scopes: list[str | None] = []

    def add(self, scope: str | None) -> None:
        """Nodes made from here on, by the thread that asks, belong to ``scope``."""
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._scopes.append(scope)

    def at(self, node: Any) -> str | None:
        """The scope of a node of this forward."""
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._scopes[place] if place >= 0 else None


class Scopes:
    """The part of the step (``state``, ``forward``, ``backward``, ``optimizer``, ``checkpoint``), and the scopes that
    are open."""

    def __init__(self) -> None:
        self.part = ""
        self._open: list[str] = []
        self._first_marks = _Marks()
        self._marks: WeakKeyDictionary[Rerun, _Marks] = WeakKeyDictionary()

    def begin_step(self) -> None:
        """Forwards from here on are of another step."""
        self._first_marks = _Marks()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What happens inside is named after ``name``, and so are the backwards of autograd nodes that are made
        there."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def _mark(self) -> None:
        # Nodes are made where there is a gradient to come; a backward makes none, and is in no order with forwards.
        if torch.is_grad_enabled():
            again = current_rerun()
            marks = self._first_marks if again is None else self._marks.setdefault(again, _Marks())
            marks.add(self._open[-1] if self._open else None)

    def here(self) -> str:
        """Innermost scope; in a backward that of the forward that made the running autograd node, and its name."""
        if self._open:
            return self._open[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            return name
        again = current_rerun()
        # What asks for a rerun belongs to the forward around it.
        return f"{self._scope_of(node, again.outer if again is not None and again.in_forward else again)}|{name}"

    def _scope_of(self, node: Any, made_in: Rerun | None) -> str:
        """The scope in which a node was made, by the first forward or in a rerun."""
        if made_in is None:
            return self._first_marks.at(node) or ""
        found = self._marks[made_in].at(node) if made_in in self._marks else None
        return self._scope_of(made_in.node, made_in.outer) if found is None else found

    def phase(self) -> str:
        """The part of the step, or ``recompute`` for a forward that a backward repeats."""
        again = current_rerun()
        return "recompute" if again is not None and again.in_forward else self.part
