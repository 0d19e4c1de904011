"""Variants of outside packages that are installed here, each in a process of its own: near the reference, and in their
deterministic mode the same bits in five replays, over all cases and at the size of a layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.outside_versions import KNOWN_PATHS
from megatron.core.ops.registry import Guarantee
from megatron.training.setup.pinned_environment import PINS
from tests.architecture.sources import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

DECLARED = {f"{op.spec.name}={v.name}": v for op in ALL_OPS for v in op.variants if v.outside is not None}
HERE = {choice: v for choice, v in DECLARED.items() if v.outside.installed}


def _run(choice: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name not in {pin.name for pin in PINS}}
    command = [sys.executable, "-m", "tests.support.outside_leg", choice]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("choice", sorted(HERE))
def test_outside_variant_is_what_it_is_declared_to_be(choice: str) -> None:
    found = _run(choice)
    print(f"\n{choice}: {found}")
    assert found["far"] == []
    if HERE[choice].guarantee["cuda"] is Guarantee.NONE:
        # Whether its bits differed this time is luck; that it promises nothing is not.
        assert choice in {variant for path in KNOWN_PATHS for variant in path.variants}
    else:
        assert found["changing"] == []
        assert all(same for place, same in found.items() if place.startswith("replays"))


def test_what_was_not_run_is_said() -> None:
    for choice, variant in DECLARED.items():
        assert bool(variant.guarantee) == variant.outside.installed
        if choice not in HERE:
            print(f"\nnot run, {variant.outside.package} is not installed: {choice}")
