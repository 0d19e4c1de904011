"""Comparing tensors by their bits: equality, first difference, digests as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width; -0.0 and 0.0 differ, NaNs compare by payload."""
    tensor = tensor.detach().contiguous()
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tensors first differ, in row-major order."""

    count: int
    numel: int
    index: tuple[int, ...]
    left: float
    right: float

    def __str__(self) -> str:
        return f"{self.count} of {self.numel} elements differ; first at {self.index}: {self.left!r} and {self.right!r}"


def first_difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """The first element whose bits differ, or ``None``.

    Raises:
        ValueError: shapes or types differ.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"cannot compare {left.dtype}{tuple(left.shape)} with {right.dtype}{tuple(right.shape)}")
    unequal = bits(left) != bits(right)
    count = int(unequal.sum())
    if not count:
        return None
    index = tuple(int(i) for i in unequal.nonzero()[0])
    return Difference(count, left.numel(), index, left[index].item(), right[index].item())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True where shape, type and every bit agree."""
    return left.shape == right.shape and left.dtype == right.dtype and bool((bits(left) == bits(right)).all())


def sha256_of(tensor: torch.Tensor) -> str:
    """SHA-256 of type, shape and bytes; for tests and small tensors (it copies to the host)."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    body = bits(tensor).cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + body).hexdigest()


_MASK64 = (1 << 64) - 1


def digest_hex(total: torch.Tensor | Sequence[int]) -> str:
    """32 hex digits of a summed layout-free digest; of integers the low 64 bits count."""
    lanes: Sequence[int] = total.tolist() if isinstance(total, torch.Tensor) else total
    return "".join(f"{lane & _MASK64:016x}" for lane in lanes)
