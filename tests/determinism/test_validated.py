"""From a difference between two real commands to its operation, and on to a fix that is proven: ``bisect`` and
``validate`` as a user calls them.

The two runs take different variants of one op, as two machines with different defaults would; the patch pins it.

    pytest -m slow -s tests/determinism/test_validated.py
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.determinism.report import Exit
from tests.support.launch import ROOT
from tests.support.training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FLAGS = f"{TINY} --hybrid-layer-pattern M*E --global-batch-size 2 --train-iters 3 --eval-iters 0"
OTHER = "--op-variants ssd_scan=reference"
PINNED = "--op-variants ssd_scan=deterministic"


def training(more: str = "") -> str:
    """The command of a run in one process."""
    return shlex.join([sys.executable, "pretrain_hybrid.py", *shlex.split(FLAGS), *shlex.split(more)])


def command(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code of ``megatron-determinism`` and the object it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron.determinism", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_variants_of_an_op_are_told_apart_and_the_pinned_one_is_proven(tmp_path: Path):
    folder = str(tmp_path / "bisect")
    code, found = command(
        "bisect", "--dir", folder, "--against", training(OTHER), "--json", "--", *shlex.split(training())
    )
    assert code == Exit.DIFFERENT, found
    assert (found["op"], found["mechanism"]) == ("ssd_scan", "other_variant"), found
    assert {(c["run"], c["variant"]) for c in found["chosen"] if c["op"] == "ssd_scan"} == {
        ("A", "deterministic"),
        ("B", "reference"),
    }
    assert found["module"].startswith("decoder.layers.0")
    assert found["phase"] == "forward"

    still = ["validate", folder, "--json", "--against", training(OTHER), "--", *shlex.split(training(PINNED))]
    code, judged = command(*still)
    assert code == Exit.DIFFERENT, "a patch of one side alone is none"
    assert judged["message"].startswith("not fixed")

    code, judged = command("validate", folder, "--json", "--", *shlex.split(training(PINNED)))
    print(json.dumps({key: judged[key] for key in ("message", "step_s_before", "step_s_after", "cost")}))
    assert code == Exit.SAME, judged
    assert judged["original"]["first_difference"]["iteration"] == 1
    assert judged["step_s_before"] > 0
    assert judged["step_s_after"] > 0
    assert judged["cost"] == pytest.approx(judged["step_s_after"] / judged["step_s_before"] - 1)
