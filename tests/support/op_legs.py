"""Processes that replay all ops, and what differs between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.architecture.sources import ROOT

Found = dict[str, Any]
AT_ONCE = 12
"""Processes that share a GPU; each compiles for itself first."""


def run_leg(device: str, *words: str, **environment: str) -> Found:
    """What a fresh process of ``tests/support/op_leg.py`` prints."""
    command = [sys.executable, "-m", "tests.support.op_leg", device, *words]
    # Another test of this process may have withdrawn it.
    whole = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
    done = subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_legs(device: str, ops: Sequence[str], *words: str, **environment: str) -> Found:
    """The same of a process for every op, some at once.

    One that can contend is enough: processes take turns on a GPU, and what a stream began in one may end in others.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        legs = list(pool.map(lambda op: run_leg(device, *words, op, **environment), ops))
    return {
        "digests": {name: digest for leg in legs for name, digest in leg["digests"].items()},
        "changing": [name for leg in legs for name in leg["changing"]],
        "can_contend": any(leg["can_contend"] for leg in legs),
    }


def differing(legs: Sequence[Found]) -> list[str]:
    """Cases whose digests are not the same in all legs."""
    first = legs[0]["digests"]
    names = {name for leg in legs for name in leg["digests"]}
    return sorted(name for name in names if any(leg["digests"].get(name) != first.get(name) for leg in legs))


def seen_planted(plain: Found, planted: Found) -> bool:
    """Whether what was planted shows, and nothing else: one op differs between processes, the other between calls."""
    between, within = differing([plain, planted]), planted["changing"]
    expected = (("rms_norm=", between), ("moe_permute=", within))
    return all(subjects and all(name.startswith(op) for name in subjects) for op, subjects in expected)
