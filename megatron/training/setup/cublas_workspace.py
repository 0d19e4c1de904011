"""CUBLAS_WORKSPACE_CONFIG, which is slow to read: gone where it says nothing that does not hold without it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.training.setup.environment import read_environment, withdraw

NAME = "CUBLAS_WORKSPACE_CONFIG"
DEFAULTS = {(9, 0): ":4096:8"}
"""What torch takes where the variable is not set, by compute capability; on other devices no value that is accepted
in deterministic mode (``CublasHandlePool.cpp``)."""


def read_by_every_product() -> bool:
    """Whether this torch compiles a regular expression over the variable in every product, which takes the host 60 us;
    it does not since it can be told the size."""
    return not hasattr(torch.backends.cuda, "cublas_workspace_size")


def says_nothing_more(environment: Mapping[str, str], capability: tuple[int, int]) -> bool:
    """Whether workspaces are the same without the variable."""
    return NAME in environment and environment[NAME] == DEFAULTS.get(capability)


def settle_workspace(device: torch.device) -> bool:
    """Take the variable out of the environment of this process where that changes nothing and makes products cheaper;
    returns whether it did.

    torch reads in it, at every product, the size of the workspace that it gives cuBLAS for each stream; a torch that
    also asks it whether products are deterministic does so at the first one, which is made here. Call it once the
    environment has been recorded.
    """
    if device.type != "cuda" or not read_by_every_product():
        return False
    if not says_nothing_more(read_environment(), torch.cuda.get_device_capability(device)):
        return False
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)
    withdraw(NAME)
    return True
