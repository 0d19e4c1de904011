"""The stateful generators, for users' code. Training of ours draws from keys only and never moves them."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from megatron.core.process_groups.topology import Coordinates

PIPELINE_STRIDE = 100
"""Seeds of pipeline stages are this far apart, as in Megatron."""


def seed_generators(seed: int, at: Coordinates) -> None:
    """Seed Python, NumPy and torch (CPU and CUDA) with ``seed + 100 * pipeline rank``."""
    base = seed + PIPELINE_STRIDE * at.pp
    random.seed(base)
    np.random.seed(base)
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


def key_state_digest(seed: int, iteration: int) -> str:
    """32 hex digits of what the counter-based draws of a step depend on: the seed and the iteration."""
    return hashlib.blake2b(f"keys:{seed}:{iteration}".encode(), digest_size=16).hexdigest()
