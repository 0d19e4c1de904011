"""A run that was stopped is the run that never stopped: the full state of resumed legs against a straight leg.

Every cell trains 8 steps straight, and the same steps in fresh processes that are stopped on the way. The fingerprints
(weights, masters, moments, losses, norm, data, generators of every rank, at every step) and the checkpoints after step
8 (expert bias, counters and step counts too) must agree in every bit.

By default every pair of settings is tried once, resumed after step 3; with ``-m slow`` the full product, stopped after
steps 1, 3 and 5.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron.determinism.checkpoint import diff_checkpoints
from megatron.determinism.compare import compare
from megatron.determinism.report import Exit
from megatron.training.observe.fingerprint import rank_file, read_lines
from tests.support.data import write_self_data
from tests.support.legs import finished

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2vpp2": (2, "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|*|E|-"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2ep2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "all8": (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
}
FACTORS = {
    "layout": tuple(LAYOUTS),
    "precision": ("fp32", "bf16"),
    "saving": ("sync", "async"),
    "noise": ("quiet", "noise"),
    "optimizer": ("whole", "cut"),
}
FLAGS = {
    "fp32": "",
    "bf16": "--bf16",
    "sync": "",
    "async": "--async-save",
    "quiet": "",
    "noise": "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1 --num-workers 2",
    "whole": "",
    "cut": "--use-distributed-optimizer",
}
STOPS = (1, 3, 5)
LAST = 8

Cell = tuple[str, ...]


def pairs_of(cell: Cell) -> set[tuple]:
    """Every pair of values of two factors that the cell tries."""
    return set(itertools.combinations(enumerate(cell), 2))


def covering_cells() -> list[Cell]:
    """Cells in which every pair of values of every two factors is tried, chosen greedily; the same ones every time."""
    every = list(itertools.product(*FACTORS.values()))
    missing = set().union(*map(pairs_of, every))
    chosen = []
    while missing:
        best = max(every, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


# All axes at once, on 8 ranks, is one cell of its own by default: it takes as long as the other cells of its settings.
EIGHT: Cell = ("all8", "bf16", "async", "noise", "cut")
CELLS = [*(cell for cell in covering_cells() if cell[0] != EIGHT[0]), EIGHT]


def flags_of(cell: Cell) -> tuple[int, str]:
    """Ranks and flags of a cell."""
    ranks, layout = LAYOUTS[cell[0]]
    return ranks, " ".join([layout, *(FLAGS[value] for value in cell[1:])])


def require_same(straight: Path, resumed: Path, ranks: int, *, steps: int = LAST) -> None:
    """Two legs did the same at the last ``steps`` steps and ended in the same state, on every rank."""
    outcome = compare(straight / "fingerprint", resumed / "fingerprint")
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.facts["common_iterations"] == steps
    for rank in range(ranks):
        one, other = (read_lines(leg / "fingerprint" / rank_file(rank)) for leg in (straight, resumed))
        assert {i: one[i] for i in other} == other, f"rank {rank}"
    outcome = diff_checkpoints(straight / "checkpoints", resumed / "checkpoints")
    assert outcome.exit == Exit.SAME, outcome
    assert not outcome.details


def run_straight(folder: Path, ranks: int, words: str) -> Path:
    """The leg that never stops; saves once, at the end."""
    finished(ranks, f"{words} {places(folder)} --save-interval 100")
    return folder


def run_resumed(folder: Path, ranks: int, words: str, stops: tuple[int, ...]) -> Path:
    """The leg that is stopped, and goes on in fresh processes."""
    for number, stop in enumerate([*stops, None]):
        going_on = f"--load {folder / 'checkpoints'} --exit-on-missing-checkpoint" if number else ""
        until = f"--exit-interval {stop}" if stop else ""
        out = finished(ranks, f"{words} {places(folder)} --save-interval 100 {going_on} {until}")
        assert (f"exiting program at iteration {stop}" in out) == bool(stop)
    return folder


def places(folder: Path) -> str:
    """Where a leg writes."""
    return f"--save {folder / 'checkpoints'} --fingerprint-dir {folder / 'fingerprint'}"


def test_cells_cover_every_pair() -> None:
    every = set().union(*(pairs_of(cell) for cell in itertools.product(*FACTORS.values()) if cell[0] != EIGHT[0]))
    assert set().union(*map(pairs_of, CELLS)) >= every
    assert len(CELLS) <= 24


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_resumed_is_straight(tmp_path: Path, cell: Cell) -> None:
    """The straight leg saves on the way as well; the resumed one goes on from there in fresh processes."""
    ranks, words = flags_of(cell)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    finished(ranks, f"{words} {places(straight)} --save-interval 3")
    going_on = f"--load {straight / 'checkpoints'} --ckpt-step 3 --save-interval 100"
    finished(ranks, f"{words} {places(resumed)} {going_on}")
    require_same(straight, resumed, ranks, steps=LAST - 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", list(itertools.product(*FACTORS.values())), ids="-".join)
def test_resumed_three_times_is_straight(tmp_path: Path, cell: Cell) -> None:
    ranks, words = flags_of(cell)
    straight = run_straight(tmp_path / "straight", ranks, words)
    resumed = run_resumed(tmp_path / "resumed", ranks, words, STOPS)
    require_same(straight, resumed, ranks)


def test_epoch_edges_and_partial_batches_on_one_rank(tmp_path: Path) -> None:
    """20 samples, batches of 8: the edge of an epoch lies inside the third batch and the run passes it three times."""
    data = write_self_data(tmp_path, [17] * 19, vocab_size=512)
    words = (
        f"--data-path {data.prefix} --split 1,0,0 --global-batch-size 8 --eval-iters 0 --dataloader-type cyclic --bf16"
    )
    straight = run_straight(tmp_path / "straight", 1, words)
    resumed = run_resumed(tmp_path / "resumed", 1, words, (1, 2, 3, 5))
    require_same(straight, resumed, 1)
