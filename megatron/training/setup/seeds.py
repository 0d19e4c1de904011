"""The stateful generators, for users' code. Training of ours draws from keys only and never moves them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch

from megatron.core.process_groups.topology import Coordinates

PIPELINE_STRIDE = 100
"""Seeds of pipeline stages are this far apart, as in Megatron."""


def seed_generators(seed: int, at: Coordinates) -> None:
    """Seed Python, NumPy and torch (CPU and CUDA) with ``seed + 100 * pipeline rank``, NumPy with its last 32 bits."""
    base = seed + PIPELINE_STRIDE * at.pp
    random.seed(base)
    np.random.seed(base % 2**32)
    torch.manual_seed(base)


def generator_digest() -> str:
    """32 hex digits over the states of all these generators on this rank."""
    total = hashlib.blake2b(digest_size=16)
    total.update(repr(random.getstate()).encode())
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    total.update(f"{kind}{position}{has_gauss}{gauss}".encode() + np.asarray(keys).tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available():
        total.update(torch.cuda.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def generator_states() -> dict[str, torch.Tensor]:
    """The exact state of each of these generators on this rank, as uint8 tensors on the CPU, by name."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "python": _from_text(json.dumps(random.getstate())),
        "numpy": _from_text(json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, gauss])),
        "torch_cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Put every generator back into a state that ``generator_states`` returned.

    Raises:
        ValueError: a state is no such state.
    """
    version, words, gauss = json.loads(_to_text(states["python"]))
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = json.loads(_to_text(states["numpy"]))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch_cpu"])
    if "torch_cuda" in states:
        torch.cuda.set_rng_state(states["torch_cuda"])


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _to_text(values: torch.Tensor) -> str:
    return bytes(values.tolist()).decode()


def key_state_digest(seed: int, iteration: int) -> str:
    """32 hex digits of what the counter-based draws of a step depend on: the seed and the iteration."""
    return hashlib.blake2b(f"keys:{seed}:{iteration}".encode(), digest_size=16).hexdigest()
