"""UnwrittenStorage: which memory was allocated without a value and has not been filled since."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.trace.flatten import named_tensors


class UnwrittenStorage:
    """Counts, per storage that an ``empty`` gave, the bytes that later writes have not covered yet.

    A storage is filled once as many bytes were written as it has. What writes outside the dispatcher must be told of
    with ``written``.
    """

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}

    def allocated(self, value: Any) -> None:
        """The tensors in ``value`` are fresh memory without a value."""
        for _, tensor in named_tensors(value):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._missing[storage._cdata] = storage.nbytes()

    def written(self, value: Any) -> None:
        """Whole tensors in ``value`` now have a value."""
        if not self._missing:
            return
        for _, tensor in named_tensors(value):
            key = tensor.untyped_storage()._cdata
            if key in self._missing:
                self._missing[key] -= tensor.numel() * tensor.element_size()
                if self._missing[key] <= 0:
                    del self._missing[key]

    def made(self, value: Any) -> None:
        """The tensors in ``value`` are fresh results: memory that was known under the same handle is gone."""
        if not self._missing:
            return
        for _, tensor in named_tensors(value):
            self._missing.pop(tensor.untyped_storage()._cdata, None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a part of the tensor's storage was never seen to be written."""
        return bool(self._missing) and tensor.untyped_storage()._cdata in self._missing

    def clear(self) -> None:
        """Forget everything."""
        self._missing.clear()
