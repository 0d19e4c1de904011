"""Recipes nobody thought of, each on layouts nobody thought of: the layouts of a case have one logical layout, so their
runs, one of which may be stopped and gone on with on another of them, write the same fingerprint.

A case is drawn from its number, which is all that has to be known to draw it again. ``RANDOM_LAYOUTS=FIRST:COUNT`` in
the environment runs others: ``RANDOM_LAYOUTS=1000:50 bash tests/run.sh -m slow tests/dist/test_random_layouts.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron.determinism.compare import compare
from megatron.determinism.report import Exit
from megatron.training.data.batches import BatchReader
from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics
from tests.support.draws import STEPS, Draw, Layout, drawn_layouts
from tests.support.legs import finished, run_legs
from tests.support.planted import change_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIRST, COUNT = map(int, os.environ.get("RANDOM_LAYOUTS", "0:6").split(":"))
STOP = 2


def _run(folder: Path, *layouts: Layout) -> Path:
    """A run on the first layout, which stops and goes on with the second one if there is one; its fingerprint."""
    stop = f"--exit-interval {STOP} --save {folder}/checkpoints --load {folder}/checkpoints --save-interval 100"
    for layout in layouts:
        finished(
            layout.world, f"{layout.words} {stop if len(layouts) > 1 else ''} --fingerprint-dir {folder}/fingerprint"
        )
    return folder / "fingerprint"


@pytest.mark.parametrize("case", range(FIRST, FIRST + COUNT))
def test_layouts_of_a_drawn_recipe_write_one_fingerprint(case: int, tmp_path: Path) -> None:
    draw = Draw(case)
    first, *others = drawn_layouts(draw)
    print(first, *others, sep="\n")
    straight = _run(tmp_path / "0", first)
    runs = [others] if draw.random() < 0.5 else [[other] for other in others]
    for number, layouts in enumerate(runs, 1):
        outcome = compare(straight, _run(tmp_path / str(number), *layouts))
        assert (outcome.exit, outcome.facts["common_iterations"]) == (0, STEPS), outcome


def _change_a_bit() -> None:
    """The first step leaves another bit in a master of each rank."""
    step = TrainStep.run

    def changed(self: TrainStep, reader: BatchReader, iteration: int, *args: Any, **kwargs: Any) -> StepMetrics:
        metrics = step(self, reader, iteration, *args, **kwargs)
        if iteration == 1:
            change_memory(next(self.optimizer.owned_pieces()).values)
        return metrics

    TrainStep.run = changed


def test_another_bit_is_another_fingerprint(tmp_path: Path) -> None:
    first = drawn_layouts(Draw(5))[0]
    straight, other = _run(tmp_path / "0", first), tmp_path / "1"
    ended = run_legs(first.world, f"{first.words} --fingerprint-dir {other}", _change_a_bit)
    assert {rank.code for rank in ended} == {0}, ended
    assert compare(straight, other).exit == Exit.DIFFERENT
