"""Iterations of a real run are replayed from its checkpoint, traced, on the same ranks and on fewer; bit for bit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.trace.format import TRACE_FILES
from megatron.determinism.replay import replay
from megatron.determinism.report import Exit, Outcome
from tests.support.launch import ROOT, launch
from tests.support.training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = (
    "--seq-length 32 --max-position-embeddings 32 --global-batch-size 4 --hidden-dropout 0.1 --train-iters 4 "
    "--hybrid-layer-pattern "
)
RUNS = {"dp": FLAGS + "ME*-", "pp": FLAGS + "ME|*- --pipeline-model-parallel-size 2"}
SMALLER = {"dp": FLAGS + "ME*-", "pp": FLAGS + "ME*-"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs on two ranks that were saved at iteration 2, each with its fingerprint."""
    root, made = tmp_path_factory.mktemp("original"), set()

    def folder(name: str) -> Path:
        where = root / name
        if name not in made:
            flags = f"--save {where}/checkpoints --save-interval 2 --fingerprint-dir {where}/fingerprint"
            done = launch(2, f"{RUNS[name]} {flags}")
            assert done.returncode == 0, done.stderr
            made.add(name)
        return where

    return folder


def replayed(where: Path, ranks: int, flags: str, folder: Path) -> Outcome:
    """The replay of iterations 3 and 4."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "pretrain_hybrid.py"), *shlex.split(f"{TINY} {flags} --load {where}/checkpoints")]
    return replay(command, folder, where / "fingerprint", (4, 4), "op")


@pytest.mark.parametrize(("name", "ranks"), [("dp", 2), ("dp", 1), ("pp", 1)])
def test_replay_is_the_original(original: Callable[[str], Path], name: str, ranks: int, tmp_path: Path):
    flags = RUNS[name] if ranks == 2 else SMALLER[name]
    outcome = replayed(original(name), ranks, flags, tmp_path / "replay")
    assert outcome.exit == Exit.SAME, outcome
    assert (outcome.facts["first_iteration"], outcome.facts["last_iteration"]) == (3, 4)
    traces = list(Path(outcome.facts["trace"]).glob(TRACE_FILES))
    assert len(traces) == ranks
    for trace in traces:
        text = trace.read_bytes()
        assert text.count(b'{"e":"op"') > 500
        assert b'"iteration":3' not in text


def test_another_learning_rate_is_not_faithful(original: Callable[[str], Path], tmp_path: Path):
    flags = RUNS["dp"] + " --lr 2e-3 --override-opt-param-scheduler"
    outcome = replayed(original("dp"), 1, flags, tmp_path / "replay")
    assert outcome.exit == Exit.DIFFERENT, outcome
    assert outcome.verdict.startswith("not faithful")
    assert any("lr" in line for line in outcome.details)
