"""Node: what autograd functions derive from that are called many times a step."""

from __future__ import annotations

from typing import Any

import torch


class Node(torch.autograd.Function):
    """A ``torch.autograd.Function`` that functorch's transforms (``vmap``, ``grad``) cannot see: torch's own ``apply``
    looks for their wrappers in all arguments of every call, which takes the host as long as the rest of it."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As ``torch.autograd.Function.apply``."""
        return super(torch.autograd.Function, cls).apply(*args)
