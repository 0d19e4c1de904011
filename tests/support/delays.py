"""Ranks that come late: random pauses before collectives, on the host and, where there is one, on the GPU's stream."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.process_groups import collectives

LONGEST_S = 2e-3
_CYCLES_PER_S = 1.5e9


class Delayed:
    """``torch.distributed``, except that one rank in two pauses up to ``LONGEST_S`` before a collective, and the others
    now and then."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._slow = draw, draw.random() < 0.5

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(dist, name)
        return self._late(found) if callable(found) and name.startswith(("all_", "batch_", "broadcast")) else found

    def _late(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **kwargs: Any) -> Any:
            if self._slow or self._draw.random() < 0.1:
                time.sleep(self._draw.random() * LONGEST_S)
                if torch.cuda.is_available():
                    torch.cuda._sleep(int(self._draw.random() * LONGEST_S * _CYCLES_PER_S))
            return call(*args, **kwargs)

        return later


def delay_collectives(seed: int, rank: int) -> Callable[[], None]:
    """Delay the collectives of this process from now on; returns what ends that."""
    real = collectives.dist
    collectives.dist = Delayed(random.Random(1000 * seed + rank))

    def end() -> None:
        collectives.dist = real

    return end
