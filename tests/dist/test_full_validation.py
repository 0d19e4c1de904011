"""--full-validation: every sample of the validation data counts once, on any layout the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data import write_self_data
from tests.support.ranks import run_ranks
from tests.support.training import TINY, build_here

BASE = TINY.replace("--mock-data", "").replace("--vocab-size 509", "--vocab-size 4096")
FLAGS = (
    "--hybrid-layer-pattern M*|E- --global-batch-size 4 --eval-interval 2 --full-validation "
    "--logical-data-parallel-size 2 --split 1,1,0"
)


def whole_loss(flags: str) -> str:
    """Rank function: the loss over all validation data, as a hex float."""
    run = build_here(f"{FLAGS} {flags}", BASE)
    reader, shape = run.valid_reader(), run.step.shape.evaluation
    assert reader is not None
    return run.step.evaluate(reader, shape.batches, 0, 0)["lm loss"].hex()


def test_every_sample_counts_once_on_every_layout(tmp_path: Path) -> None:
    """Seven samples in two batches of two shards: one place is padding."""
    prefix = write_self_data(tmp_path, [65] * 14, vocab_size=4096).prefix
    words = f"--data-path {prefix}"
    run = build_here(f"{FLAGS} {words}", BASE)
    assert len(run.splits.valid) == 7
    shape = run.step.shape.evaluation
    assert (shape.batches, shape.batch_size, shape.stride) == (2, 4, 2)
    one_by_one = run.reader(run.splits.valid)
    pairs = [run.step.evaluate(one_by_one, 1, 0, first)["lm loss"] for first in (0, 3)]
    fours = float.fromhex(whole_loss(words))
    # Samples 0..3 and 3..6 together hold sample 3 twice.
    alone = build_here(f"{FLAGS} {words} --eval-global-batch-size 2", BASE)
    assert alone.step.shape.evaluation.batches == 4
    assert alone.step.evaluate(alone.valid_reader(), 4, 0, 0)["lm loss"] == pytest.approx(fours, rel=1e-6)
    third = 4 * pairs[0] + 4 * pairs[1] - 7 * fours
    assert third == pytest.approx(_loss_of_sample(run, 3), rel=1e-4)
    for layout in ("", "--pipeline-model-parallel-size 2"):
        assert set(run_ranks(2, whole_loss, f"{words} {layout}")) == {fours.hex()}


def _loss_of_sample(run, number: int) -> float:
    """Both shards read it."""

    class Same:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int):
            return run.splits.valid[number]

    return run.step.evaluate(run.reader(Same()), 1, 0, 0)["lm loss"]
