"""Counter-based random numbers: a draw is a function of (key, element index), never of how many came before.

The generator is ``ops/philox.py``. Keys are hashed from names and logical coordinates; an element's index is its
row-major position in the *global* tensor, so every layout draws the same values and any piece can be drawn alone.
"""

from __future__ import annotations

import hashlib
import math

import torch

from megatron.core.contracts.param_spec import Initial, LogicalShard, ParamSpec
from megatron.core.ops.philox import Key, box_mask, draw_into, random_words, uniform

__all__ = ["Key", "box_mask", "draw_initial", "draw_into", "draw_shard", "key_of", "uniform", "uniform_double"]


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


def draw_shard(spec: ParamSpec, shard: LogicalShard, seed: int, out: torch.Tensor, start: int = 0) -> None:
    """Fill ``out`` (contiguous; fp32, or a type the fp32 values are rounded to once) with the initial values of the
    elements of one of a parameter's logical shards, from its element ``start`` on in its row-major order."""
    key = key_of(seed, "initial value", spec.name)
    draw_into(out, spec.shape, shard, lambda index: draw_initial(spec.initial, key, index), start)
