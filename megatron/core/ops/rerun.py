"""Rerun: a backward that computes a part of its forward again says so, for whoever watches a step.

A watcher cannot tell by itself: on a device a backward runs in a thread of torch's own, where autograd counts its nodes
anew, so neither threads nor the nodes' sequence numbers say which of two forwards made a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


class Rerun:
    """A part of a forward that is computed again, and the backward through what that made.

    ``in_forward`` until whoever computes sets it false, before the backward through the result; ``node`` is the
    autograd node in whose backward all this happens, and ``outer`` the rerun that made this node, if one did.
    """

    def __init__(self) -> None:
        self.in_forward = True
        self.node: Any = torch._C._current_autograd_node()
        self.outer: Rerun | None = _CURRENT.get()


_CURRENT: ContextVar[Rerun | None] = ContextVar("rerun", default=None)


@contextmanager
def rerun() -> Iterator[Rerun]:
    """Around a second computation and, where there is one, the backward through its result."""
    again = Rerun()
    token = _CURRENT.set(again)
    try:
        yield again
    finally:
        _CURRENT.reset(token)


def current_rerun() -> Rerun | None:
    """The innermost one of this thread."""
    return _CURRENT.get()
