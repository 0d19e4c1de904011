"""``bisect`` from metrics to the operation, on real runs: every common source is named, and how long that takes.

pytest -m slow -s tests/determinism/test_bisect_faults.py      prints a line per fault
"""

from __future__ import annotations

import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest

from megatron.determinism.bisect import bisect
from megatron.determinism.report import Exit, Outcome
from tests.determinism.test_planted_faults import EXPECTED
from tests.support.launch import ROOT
from tests.support.planted import FAULTS
from tests.support.training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = (
    f"{TINY} --hybrid-layer-pattern M*E --global-batch-size 2 --expert-model-parallel-size 2 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters 3 --eval-iters 0"
)


def found(fault: str, ranks: int, flags: str, folder: Path) -> tuple[Outcome, float]:
    """What ``bisect`` says, and the seconds it took."""
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {ranks}"
    command = shlex.split(f"{launcher} -m tests.support.planted_run {fault} {flags}")
    start = time.monotonic()
    outcome = bisect(command, folder)
    return outcome, time.monotonic() - start


def show(fault: str, outcome: Outcome, seconds: float) -> None:
    facts = outcome.facts
    print(
        f"{fault:20} {facts.get('mechanism')!s:20} {facts.get('op')!s:32} {facts.get('module')!s:40} {seconds:6.1f} s"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    outcome, seconds = found(fault, 2, SMALL, tmp_path / "bisect")
    show(fault, outcome, seconds)
    said = "\n".join([outcome.verdict, *outcome.details])
    assert outcome.exit == Exit.DIFFERENT, said
    assert outcome.facts["mechanism"] == fault, said
    assert outcome.facts["iteration"] == 2, said
    assert outcome.facts["origin_ranks"] == EXPECTED[fault][1], said
    assert outcome.facts["op"].startswith(EXPECTED[fault][2]), said


def test_model_of_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    quickstart = runpy.run_path(str(ROOT / "examples/quickstart.py"))
    layout = quickstart["LAYOUTS"][0]
    flags = f"{quickstart['MODEL'].format(pattern=layout.pattern, iters=quickstart['TRAIN_ITERS'])} {layout.flags}"
    outcome, seconds = found("permuted_dispatch", quickstart["RANKS"], f"{flags} --mock-data", tmp_path / "bisect")
    show("quick start", outcome, seconds)
    assert outcome.facts["mechanism"] == "permuted_dispatch", outcome
