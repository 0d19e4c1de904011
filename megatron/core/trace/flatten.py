"""Finding the tensors in whatever a function takes or returns, each under a name of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_WITHOUT = (int, float, str, bytes)


def named_tensors(value: Any, label: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(label, tensor) of every tensor in nested lists, tuples, mappings and dataclasses.

    A tensor made of others (a quantised one: codes and scales) is given in its parts.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN_TENSORS and is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from named_tensors(getattr(value, name), f"{label}.{name}")
        else:
            yield label, value
    elif value is None or isinstance(value, _WITHOUT):
        return
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from named_tensors(item, f"{label}.{position}" if label else str(position))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{label}.{key}" if label else str(key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{label}.{field.name}" if label else field.name)


def plain_arguments(value: Any) -> str:
    """What is not a tensor in it, as text without addresses; tensors are left out as ``_``."""
    if isinstance(value, torch.Tensor):
        return "_"
    if value is None or isinstance(value, bool | int | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list | tuple):
        return "(" + ", ".join([plain_arguments(item) for item in value]) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{key}: {plain_arguments(item)}" for key, item in value.items()]) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={plain_arguments(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({fields})"
    return type(value).__name__
