"""Dump: arguments and results of chosen events as files, to confirm a digest or to run an operation alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.trace.flatten import named_tensors

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def on_host(value: Any) -> Any:
    """A copy of any nesting with tensors of their own on the host; strides are kept. What is neither a tensor nor a
    plain value leaves its type's name."""
    if isinstance(value, torch.Tensor):
        return _same_strides(value.detach())
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [on_host(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = all(isinstance(getattr(value, f.name), _PLAIN) for f in dataclasses.fields(value))
        return value if plain else {f.name: on_host(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, torch.memory_format | torch.layout):
        return str(value)  # neither can be pickled
    return value if isinstance(value, _PLAIN) else f"<{type(value).__name__}>"


def _same_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy with the tensor's strides, expanded dimensions included."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((span,), (1,)).cpu().clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


class Dump:
    """Writes the events whose scope starts with ``scope`` (a prefix of ``scope:name``) into ``folder``.

    The first events are kept, up to and with the one whose arguments bring the sum to ``limit_bytes``: that one is
    kept whole however large it is, results are not counted, and what came later is recorded without a dump.
    """

    def __init__(self, folder: Path, scope: str, limit_bytes: int) -> None:
        self._folder, self._scope, self._left = folder, scope, limit_bytes
        self._number = 0

    def wants(self, scope: str, name: str) -> bool:
        """Whether an event belongs to the chosen part; ``layers.1`` is no beginning of ``layers.10``."""
        whole = f"{scope}:{name}"
        if self._left <= 0 or not whole.startswith(self._scope):
            return False
        after = whole[len(self._scope) : len(self._scope) + 1]
        return not (after.isalnum() and self._scope[-1:].isalnum())

    def begin(self, kind: str, scope: str, name: str, arguments: Any) -> _Open:
        """Copy the arguments before the call; waits for the device."""
        self._left -= sum(t.numel() * t.element_size() for _, t in named_tensors(arguments))
        path = self._folder / f"{self._number:06d}.pt"
        self._number += 1
        return _Open(path, {"kind": kind, "scope": scope, "name": name, "arguments": on_host(arguments)})


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """A dump that waits for the results."""

    path: Path
    content: dict[str, Any]

    def finish(self, results: Any) -> str:
        """Write the file; returns its name within the dump folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**self.content, "results": on_host(results)}, self.path)
        return self.path.name
