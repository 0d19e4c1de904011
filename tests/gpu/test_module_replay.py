"""Blocks, stacks and the model on GPUs: every bit again, whatever runs on the device's other streams meanwhile.

Ranks of a layout have a GPU each and speak NCCL where there are as many, else they share and speak gloo. With ``-s`` a
table, with ``OUT`` set a file.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.determinism.test_module_replay import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.replay import Found, Layout, replay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
DTYPES = (torch.bfloat16, torch.float32)
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 1
SEQ = 256
ROWS: list[dict] = []


@functools.cache
def _seen(layout: Layout) -> list[list[Found]]:
    """By rank and type."""
    started = time.monotonic()
    backend = "gloo" if layout.world > GPUS else "cpu:gloo,cuda:nccl"
    of_ranks = run_ranks(layout.world, replay, layout, DTYPES, "cuda", SEQ, timeout_s=270, backend=backend)
    found = [of[subject] for rank in of_ranks for of in rank for subject in layout.subjects]
    planted = [of[f"planted: {subject}"] for rank in of_ranks for of in rank for subject in layout.subjects]
    row = {
        "layout": str(layout),
        "backend": backend,
        "subjects": len(found),
        "tensors": sum(subject["compared"] for subject in found),
        "differ": sum(len(subject) - 1 for subject in found),
        "planted_seen": sum(map(bool, planted)),
        "seconds": round(time.monotonic() - started, 1),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in row.items()), end="", flush=True)
    ROWS.append({**row, "found": of_ranks})
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "module_replay.json").write_text(json.dumps(ROWS, indent=1))
    return of_ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_replay_has_the_same_bits_under_contention(layout: Layout, dtype: torch.dtype) -> None:
    for rank, by_type in enumerate(_seen(layout)):
        for subject in layout.subjects:
            found = dict(by_type[DTYPES.index(dtype)][subject])
            assert found.pop("compared") > 10
            assert not found, f"rank {rank}, {subject}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_another_order_of_rows_in_one_op_is_seen(layout: Layout, dtype: torch.dtype) -> None:
    """The control."""
    for by_type in _seen(layout):
        for subject in layout.subjects:
            planted = by_type[DTYPES.index(dtype)][f"planted: {subject}"]
            assert any(name.startswith("gradient") for name in planted), subject
