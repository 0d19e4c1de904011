"""Ranks that come late: random pauses before collectives, on the host and, where there is one, on the GPU's stream."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron.core.process_groups import collectives

LONGEST_S = 2e-3
_CYCLES_PER_S = 1.5e9


class Delayed:
    """A module of collectives, except that one rank in two pauses up to ``LONGEST_S`` before each, and the others now
    and then."""

    def __init__(self, module: ModuleType, draw: random.Random, slow: bool) -> None:
        self._module, self._draw, self._slow = module, draw, slow

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(self._module, name)
        return self._late(found) if callable(found) and name.startswith(("all_", "batch_")) else found

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
    real, draw = (collectives.dist, collectives.backend), random.Random(1000 * seed + rank)
    slow = draw.random() < 0.5
    collectives.dist, collectives.backend = (Delayed(module, draw, slow) for module in real)

    def end() -> None:
        collectives.dist, collectives.backend = real

    return end
