"""Megatron's public names. They load on first use; importing this package loads nothing."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ModelParallelConfig": ("megatron.core.config.parallel", "ModelParallelConfig"),
    "mpu": ("megatron.core.parallel_state", ""),
    "parallel_state": ("megatron.core.parallel_state", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
