"""Counter-based random numbers: a draw is a function of (key, element index), never of how many came before.

The generator is ``ops/philox.py``. Keys are hashed from names and logical coordinates; an element's index is its
row-major position in the *global* tensor, so every layout draws the same values and any piece can be drawn alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from megatron.core.contracts.param_spec import Initial, LogicalShard
from megatron.core.ops.philox import Key, box_index, keep_mask, random_words, uniform

__all__ = ["Key", "box_index", "draw_initial", "draw_shard", "keep_mask", "key_of", "uniform", "uniform_double"]

_DRAW_ELEMENTS = 1 << 22


def key_of(*parts: int | str) -> Key:
    """Key from a seed, names and logical coordinates; distinct sequences of parts give unrelated keys."""
    text = "\0".join(f"{type(p).__name__}:{p}" for p in parts)
    raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")


def uniform_double(words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """fp64 in [0, 1) with 53 random bits, from the first two of four words."""
    return (((words[0] >> 5) << 26) | (words[1] >> 6)).to(torch.float64) * 2.0**-53


def draw_initial(initial: Initial, key: Key, index: torch.Tensor) -> torch.Tensor:
    """Initial values (fp32) at global element indices. Computed in fp64 and rounded once."""
    if initial.kind == "constant":
        return torch.full(index.shape, initial.a, dtype=torch.float32, device=index.device)
    words = random_words(key, index)
    u = uniform_double(words)
    if initial.kind == "normal":
        # Box-Muller; 1 - u lies in (0, 1].
        angle = uniform_double(words[2:]) * (2.0 * math.pi)
        return (torch.sqrt(-2.0 * torch.log(1.0 - u)) * torch.cos(angle) * initial.a).to(torch.float32)
    if initial.kind == "inverse_softplus_log_uniform":
        low, high = math.log(initial.a), math.log(initial.b)
        value = torch.exp(u * (high - low) + low).clamp(min=initial.floor)
        return (value + torch.log(-torch.expm1(-value))).to(torch.float32)
    value = u * (initial.b - initial.a) + initial.a
    return (torch.log(value) if initial.kind == "log_uniform" else value).to(torch.float32)


def _row_pieces(box: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut a box into runs of rows of bounded size, so that the index tensors stay small."""
    (start, stop), rest = box[0], box[1:]
    per_row = math.prod(b - a for a, b in rest)
    step = max(1, _DRAW_ELEMENTS // max(1, per_row))
    for row in range(start, stop, step):
        yield ((row, min(stop, row + step)), *rest)


def draw_shard(
    seed: int, name: str, shape: tuple[int, ...], shard: LogicalShard, initial: Initial, out: torch.Tensor
) -> None:
    """Fill ``out`` (fp32, ``shard.shape``) with the initial values of one logical shard of a global parameter."""
    key, offset = key_of(seed, "initial value", name), 0
    for box in shard.boxes:
        extent = box[shard.dim][1] - box[shard.dim][0]
        target, row = out.narrow(shard.dim, offset, extent), 0
        for piece in _row_pieces(box):
            rows = piece[0][1] - piece[0][0]
            index = box_index(shape, piece, out.device)
            target.narrow(0, row, rows).copy_(draw_initial(initial, key, index))
            row += rows
        offset += extent
