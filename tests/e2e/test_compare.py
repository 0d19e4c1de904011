"""The compare command on the folders of real runs: what must change a run is named at its first iteration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.digest.bits import bits
from megatron.training.loop.build import Run
from megatron.training.loop.pretrain import run_training
from tests.support import legs
from tests.support.data import write_documents
from tests.support.launch import ROOT
from tests.support.ranks import run_ranks

STEPS = 3
RUNS = {
    "first": "",
    "again": "",
    "seed": "--seed 1235",
    "order": "",
    "bit": "",
    "rate": "--lr 1.00000001e-2",
}
"""Name of a run: how its command line differs. ``order`` reads two documents in exchange, ``bit`` starts from weights
with one bit flipped, ``rate`` has a learning rate 1e-10 away."""


def _run_flipped(run: Run, started: float) -> None:
    """Train after the lowest bit of one weight has been flipped, in the master and in the weight that works."""
    optimizer = run.step.optimizer
    piece = next(p for p in optimizer.owned_pieces() if p.kind == "main_params" and "layers" in p.name)
    bits(piece.values)[5] ^= 1
    optimizer.write_working_weights()
    run_training(run, started)


def train_all(folder: str) -> list[str]:
    """Rank function: every run in turn; what each had to complain about."""
    errors = []
    for name, flags in RUNS.items():
        data = f"{folder}/{'swapped' if name == 'order' else 'data'}"
        words = f"--data-path {data} --split 1 --eval-iters 0 --train-iters {STEPS} {flags}"
        legs.run_training = _run_flipped if name == "bit" else run_training
        errors.append(legs.leg(f"{words} --fingerprint-dir {folder}/{name}").error)
    return errors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    documents = [np.full(17, 7 * i + 3) for i in range(12)]
    write_documents(str(folder / "data"), documents, vocab_size=512)
    write_documents(str(folder / "swapped"), [documents[i ^ 1] for i in range(12)], vocab_size=512)
    assert run_ranks(1, train_all, str(folder)) == [[""] * len(RUNS)]
    return folder


def compared(folders: Path, other: str, *flags: str) -> tuple[int, dict]:
    """Exit code and JSON of ``megatron-determinism compare first OTHER``."""
    words = ["compare", str(folders / "first"), str(folders / other), "--json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.determinism", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


def test_one_recipe_twice_is_identical(folders: Path) -> None:
    code, facts = compared(folders, "again")
    assert (code, facts["common_iterations"], facts["first_difference"]) == (0, STEPS, None)
    assert {"lm_loss", "grad_norm", "params", "main_params", "exp_avg", "data"} <= set(facts["compared_fields"])


@pytest.mark.parametrize(
    ("other", "inputs", "iteration", "changed", "kept"),
    [
        ("seed", {"seed", "data_digest"}, 1, {"lm_loss", "grad_norm", "params", "data", "rng"}, {"learning_rate"}),
        ("order", {"data_digest"}, 1, {"lm_loss", "grad_norm", "exp_avg", "data"}, {"learning_rate", "rng", "params"}),
        ("bit", set(), 1, {"params", "main_params"}, {"data", "learning_rate", "rng"}),
        ("rate", {"recipe.optimizer.lr"}, 2, {"learning_rate"}, {"lm_loss", "grad_norm", "data", "exp_avg"}),
    ],
)
def test_what_differs_is_named(
    folders: Path, other: str, inputs: set[str], iteration: int, changed: set[str], kept: set[str]
) -> None:
    """Fixed inputs that differ end with 2 and, with --force, like any other difference with 1 at its first iteration:
    the warm-up starts at a rate of 0, so the first step moves no weight."""
    if inputs:
        code, facts = compared(folders, other)
        assert code == 2
        assert inputs <= {found["field"] for found in facts["differing_inputs"]}
    code, facts = compared(folders, other, *["--force"] * bool(inputs))
    assert code == 1
    assert facts["first_difference"]["iteration"] == iteration
    fields = set(facts["first_difference"]["fields"])
    assert changed <= fields
    assert not kept & fields
