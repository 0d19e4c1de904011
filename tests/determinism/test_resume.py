"""A run that was stopped is the run that never stopped: the full state of resumed legs against a straight leg.

Every cell trains straight, and the same steps in fresh processes that are stopped on the way. The fingerprints
(weights, masters, moments, losses, norm, data, generators of every rank, at every step) and the last checkpoints
(expert bias, counters and step counts too) must agree in every bit. Every cell crosses the edge of an epoch inside a
batch, after step 3.

Every pair of values of two settings is tried in ``CELLS``, six steps long and resumed after step 3, so that an
evaluation and a save lie on both sides; the default run takes the first nine, which have 353 of the 405 pairs,
``-m slow`` the others. With ``-m slow`` also every cell, and the full product of the settings that act on how a state
is stored, eight steps long and stopped after steps 1, 3 and 5.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron.determinism.checkpoint import diff_checkpoints
from megatron.determinism.compare import compare
from megatron.determinism.report import Exit
from megatron.training.config.manifest import read_manifest
from megatron.training.observe.fingerprint import rank_file, read_lines
from tests.support.data import write_self_data
from tests.support.legs import blended, finished, run_legs

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = pytest.mark.timeout(600)

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "dp2": (2, "", "M*E-"),
    "tp2": (2, TP2, "M*E-"),
    "pp2": (2, PP2, "M*|E-"),
    "pp2vpp2": (2, PP2, "M|*|E|-"),
    "ep2": (2, EP2, "M*E-"),
    "tp2ep2": (2, f"{TP2} {EP2} --expert-tensor-parallel-size 1", "M*E-"),
    "all8": (8, f"{TP2} {EP2} --expert-tensor-parallel-size 1 {PP2}", "M*|E-"),
}
FACTORS = {
    "layout": (*LAYOUTS,),
    "precision": ("fp32", "bf16"),
    "saving": ("sync", "async"),
    "noise": ("quiet", "noise"),
    "optimizer": ("whole", "cut"),
    "recompute": ("kept", "selective", "full"),
    "mtp": ("next", "depths", "repeated"),
    "batch": ("steady", "growing"),
    "data": ("one", "blend"),
    "loss": ("mean", "tokens"),
    "embeddings": ("untied", "tied"),
    "overlap": ("turns", "overlap"),
}
STORAGE = ("layout", "precision", "saving", "noise", "optimizer")
"""Factors of which the full product is tried; the others have their first value there."""

FLAGS = {
    "bf16": "--bf16",
    "async": "--async-save",
    "noise": "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1 --num-workers 2",
    "cut": "--use-distributed-optimizer",
    "selective": "--recompute-granularity selective --recompute-modules core_attn layernorm moe moe_act",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "repeated": "--mtp-use-repeated-layer",
    # Two sequences a step up to the eighth, in step 4, then four.
    "growing": "!--global-batch-size !--train-iters !--lr-warmup-iters --train-samples 24 --lr-warmup-samples 8 "
    "--step-batch-size-schedule '0:2 128:4'",
    "tokens": "--calculate-per-token-loss",
    "tied": "!--untie-embeddings-and-output-weights",
    "overlap": "--overlap-grad-reduce",
}
STOPS = (1, 3, 5)
MIDDLE, LAST = 3, 8
EIGHT = "all8"

Cell = tuple[str, ...]


def pairs_of(cell: Cell) -> set[tuple]:
    """Every pair of values of two factors that the cell tries."""
    return set(itertools.combinations(enumerate(cell), 2))


def every_pair() -> set[tuple]:
    """Every pair of values of every two factors, without the layout of eight ranks."""
    values = [[v for v in factor if v != EIGHT] for factor in FACTORS.values()]
    return {
        ((i, one), (j, other))
        for (i, left), (j, right) in itertools.combinations(enumerate(values), 2)
        for one in left
        for other in right
    }


def covering_cells() -> list[Cell]:
    """Cells in which every pair is tried, chosen greedily; the same ones every time."""
    missing, chosen = every_pair(), []
    while missing:
        grown = [_grown(pair, missing) for pair in sorted(missing)[::7]]
        chosen.append(max(grown, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def _grown(pair: tuple, missing: set[tuple]) -> Cell:
    """A cell with this pair, and of each other factor the value that makes most missing pairs with those before."""
    cell: dict[int, str] = dict(pair)
    for i, values in enumerate(FACTORS.values()):
        if i not in cell:
            gain = {v: sum(tuple(sorted((had, (i, v)))) in missing for had in cell.items()) for v in values}
            cell[i] = max((v for v in values if v != EIGHT), key=gain.__getitem__)
    return tuple(cell[i] for i in range(len(FACTORS)))


def product_cells() -> list[Cell]:
    """The full product of the factors of ``STORAGE``."""
    return list(itertools.product(*(values if name in STORAGE else values[:1] for name, values in FACTORS.items())))


def name_of(cell: Cell) -> str:
    """The layout, and every value that is not the first of its factor."""
    return "-".join(
        [cell[0], *(v for v, values in zip(cell[1:], [*FACTORS.values()][1:], strict=True) if v != values[0])]
    )


CELLS = covering_cells()
# The first ones have every value and most pairs; by default it stays with them.
DEFAULT = CELLS[:9]
# Everything at once, on 8 ranks.
COMPOSITE: Cell = tuple(values[-1] for values in FACTORS.values())


def as_parameter(cell: Cell) -> pytest.param:
    """The cell by its name, slow unless it is one of the default run's."""
    return pytest.param(cell, id=name_of(cell), marks=() if cell in DEFAULT else pytest.mark.slow)


def flags_of(cell: Cell) -> tuple[int, str]:
    """Ranks and flags of a cell."""
    ranks, layout, pattern = LAYOUTS[cell[0]]
    pattern += "" if "next" in cell else "/*E/*E"
    words = [layout, f"--hybrid-layer-pattern {pattern}", *(FLAGS.get(value, "") for value in cell[1:])]
    if {"cut", "overlap"} <= set(cell):
        words.append("--overlap-param-gather")
    if "blend" in cell:
        words.append(blended())
    return ranks, " ".join(words)


def require_same(straight: Path, resumed: Path, ranks: int, *, steps: int = LAST) -> None:
    """Two legs did the same at the last ``steps`` steps and ended in the same state, on every rank."""
    outcome = compare(straight / "fingerprint", resumed / "fingerprint")
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.facts["common_iterations"] == steps
    states: dict[int, set[str]] = {}
    for rank in range(ranks):
        one, other = (read_lines(leg / "fingerprint" / rank_file(rank)) for leg in (straight, resumed))
        assert {i: one[i] for i in other} == other, f"rank {rank}"
        for iteration, line in other.items():
            states.setdefault(iteration, set()).add(line["rng"])
    # No two ranks have the same generators, neither before nor after the resume.
    assert [len(distinct) for distinct in states.values()] == [ranks] * steps
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
    values = [[v for v in factor if v != EIGHT] for factor in FACTORS.values()]
    pairs = sum(len(one) * len(other) for one, other in itertools.combinations(values, 2))
    assert len(every_pair()) == pairs
    assert set().union(*map(pairs_of, CELLS)) >= every_pair()
    assert len(CELLS) <= 24
    values = set(itertools.chain.from_iterable(every_pair()))
    assert set(itertools.chain.from_iterable(map(enumerate, DEFAULT))) == values
    assert len(set().union(*map(pairs_of, DEFAULT)) & every_pair()) >= 0.85 * pairs


@pytest.mark.parametrize("cell", [as_parameter(cell) for cell in (*CELLS, COMPOSITE)])
def test_resumed_is_straight(tmp_path: Path, cell: Cell) -> None:
    """The straight leg saves on the way as well; the resumed one goes on from there in fresh processes."""
    ranks, words = flags_of(cell)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    until = f"--exit-interval {2 * MIDDLE}"
    finished(ranks, f"{words} {places(straight)} {until} --save-interval {MIDDLE}")
    going_on = f"--load {straight / 'checkpoints'} --ckpt-step {MIDDLE} --save-interval 100"
    finished(ranks, f"{words} {places(resumed)} {until} {going_on}")
    require_same(straight, resumed, ranks, steps=MIDDLE)


@pytest.mark.slow
@pytest.mark.parametrize("cell", dict.fromkeys([*CELLS, COMPOSITE, *product_cells()]), ids=name_of)
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


def test_watching_the_second_leg_changes_nothing(tmp_path: Path) -> None:
    """Workers, traces, metrics, logs and steps that are computed twice, in the resumed leg only."""
    noise = "--hidden-dropout 0.1 --moe-input-jitter-eps 0.1 --dataloader-type cyclic"
    words = f"--bf16 {noise} --optimizer sgd --sgd-momentum 0.9 --exit-interval 6"
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    finished(1, f"{words} {places(straight)} --save-interval 4")
    watching = (
        f"--num-workers 2 --trace-dir {tmp_path}/trace --trace-iterations 6 --run-dir {tmp_path}/run "
        "--log-interval 1 --log-params-norm --log-num-zeros-in-grad "
        "--replay-check-interval 2"
    )
    finished(
        1, f"{words} {watching} {places(resumed)} --load {straight / 'checkpoints'} --ckpt-step 4 --save-interval 9"
    )
    one, other = (read_lines(leg / "fingerprint" / rank_file(0)) for leg in (straight, resumed))
    assert [one[i] for i in (5, 6)] == [other[i] for i in (5, 6)]
    assert compare(straight / "fingerprint", resumed / "fingerprint").exit == Exit.SAME


def test_a_longer_run_is_another_order_of_the_data_and_is_flagged(tmp_path: Path) -> None:
    """The epochs that --train-iters asks for are shuffled together, as Megatron does, so its change is no plain resume:
    refused, and where it is wanted announced and recorded."""
    checkpoints = tmp_path / "checkpoints"
    finished(1, f"--eval-iters 0 --save {checkpoints} --save-interval 100 --exit-interval 2")
    longer = f"--eval-iters 0 --load {checkpoints} --train-iters 12 --exit-interval 4 --fingerprint-dir {tmp_path}/f"
    (ended,) = run_legs(1, longer)
    assert ended.code == 2
    assert "--override-opt-param-scheduler" in ended.error
    out = finished(1, f"{longer} --override-opt-param-scheduler")
    assert "--train-iters was 8, is 12" in out
    (branch, settings) = read_manifest(tmp_path / "f")["trajectory"]["branches"]
    assert branch["why"] == ["--override-opt-param-scheduler"]
    assert settings["changed"]["recipe.training.train_iters"] == [8, 12]
