"""Finding the tensors in whatever a function takes or returns, each under a name of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_WITHOUT = frozenset({type(None), int, float, bool, str, bytes, torch.dtype, torch.device})


Named: TypeAlias = tuple[str, torch.Tensor]
"""A tensor and what it is called."""


def named_tensors(value: Any, label: str = "") -> list[Named]:
    """(label, tensor) of every tensor in nested lists, tuples, mappings and dataclasses.

    A tensor made of others (a quantised one: codes and scales) is given in its parts.
    """
    found: list[Named] = []
    _collect(value, label, found)
    return found


def _collect(value: Any, label: str, found: list[Named]) -> None:
    # Called for every argument of every operation that is traced: exact types first, they are nearly all there is.
    kind: Any = type(value)
    if kind in _PLAIN_TENSORS:
        found.append((label, value))
    elif kind in _WITHOUT:
        return
    elif kind is tuple or kind is list:
        _collect_items(enumerate(value), label, found)
    elif kind is dict:
        _collect_items(value.items(), label, found)
    elif isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                _collect(getattr(value, name), f"{label}.{name}", found)
        else:
            found.append((label, value))
    elif isinstance(value, list | tuple):
        _collect_items(enumerate(value), label, found)
    elif isinstance(value, Mapping):
        _collect_items(value.items(), label, found)
    else:
        _collect_items([(name, getattr(value, name)) for name in _fields(kind)], label, found)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass; of any other type none."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _collect_items(items: Iterable[tuple[Any, Any]], label: str, found: list[Named]) -> None:
    for key, item in items:
        kind: Any = type(item)
        if kind in _WITHOUT:
            continue
        name = f"{label}.{key}" if label else str(key)
        if kind in _PLAIN_TENSORS:
            found.append((name, item))
        else:
            _collect(item, name, found)


def plain_arguments(value: Any) -> str:
    """What is not a tensor in it, as text without addresses; tensors are left out as ``_``."""
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        return "_"
    if kind in _WITHOUT:
        return value.hex() if kind is float else repr(value)
    if kind is tuple or kind is list:
        return "(" + ", ".join(["_" if type(item) in _PLAIN_TENSORS else plain_arguments(item) for item in value]) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{key}: {plain_arguments(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, torch.Tensor):
        return "_"
    if isinstance(value, list | tuple):
        return plain_arguments(tuple(value))
    if dataclasses.is_dataclass(kind):
        fields = ", ".join([f"{name}={plain_arguments(getattr(value, name))}" for name in _fields(kind)])
        return f"{kind.__name__}({fields})"
    return kind.__name__
