"""What holds for every test: one thread, fixed seeds, poisoned memory, GPU tests only where there is a GPU.

The ranks of `tests/support/ranks.py` are processes of their own and repeat these settings themselves.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator

import numpy
import pytest

SEED = 1234

# Read by OpenMP and MKL when torch is loaded, by this process and by every child.
os.environ["OMP_NUM_THREADS"] = "1"
# cuBLAS refuses deterministic algorithms without a pinned workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no CUDA device, and say so.

    Torch is loaded (seconds) only if a collected test wants a GPU.
    """
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not wanting or cuda_is_available():
        return
    for item in wanting:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What collecting loaded stays to the end: no garbage collection of a test looks through it again."""
    gc.collect()
    gc.freeze()


def cuda_is_available() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    if importlib.util.find_spec("torch") is None:
        return False
    torch = importlib.import_module("torch")
    return bool(torch.cuda.is_available())


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds and torch's global switches are the same at the start of each test, whatever ran before.

    On CPU deterministic algorithms are on, and memory is filled with NaN before its first write, so a read
    of uninitialised memory fails the test instead of passing by luck. A GPU test turns them on where it means
    to: the nondeterministic variants tested there are refused under them. Tests of modules that never load
    torch do not pay for loading it.
    """
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
