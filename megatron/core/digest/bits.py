"""Comparing tensors by their bits: equality, first difference, a digest that does not care about the layout."""

from __future__ import annotations

import hashlib
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


_LANES = ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9), (0xD6E8FEB86659FD93, 0x94D049BB133111EB))
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: torch.Tensor, multiplier: int) -> torch.Tensor:
    x = (x ^ _shift_right(x, 32)) * _signed(multiplier)
    x = (x ^ _shift_right(x, 29)) * _signed(multiplier)
    return x ^ _shift_right(x, 32)


def shard_key(name: str, shard: int) -> tuple[int, int]:
    """Two 64-bit keys of a logical shard, one per lane of the digest."""
    raw = hashlib.blake2b(f"{name}\0{shard}".encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


def layout_free_digest(values: torch.Tensor, name: str, shard: int, start: int = 0) -> torch.Tensor:
    """Digest of a piece of one logical shard: int64 ``[2]``, to be summed (wrapping) over all pieces and shards.

    ``values`` is 1-D and holds elements ``start ...`` of the shard. Every element's bits are mixed with (name, shard,
    index in the shard), so any cut into pieces gives the same total and a permutation gives another one.
    """
    raw = bits(values).reshape(-1).to(torch.int64)
    index = torch.arange(start, start + raw.numel(), dtype=torch.int64, device=raw.device)
    sums = []
    for (golden, multiplier), key in zip(_LANES, shard_key(name, shard), strict=True):
        position = _mix(index * _signed(golden) + _signed(key), multiplier)
        sums.append(_mix((raw * _signed(golden | 1)) ^ position, multiplier).sum())
    return torch.stack(sums)


def digest_hex(total: torch.Tensor) -> str:
    """32 hex digits of a summed layout-free digest."""
    return "".join(f"{int(lane) & _MASK64:016x}" for lane in total.tolist())
