"""Which iterations are evaluated after, evaluation without training, and when garbage is collected."""

from __future__ import annotations

import gc
import time

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.splits import requested_sizes
from megatron.training.config.training import TrainingConfig
from megatron.training.data.batches import BatchReader
from megatron.training.loop.garbage import GarbageControl
from megatron.training.loop.pretrain import run_training
from tests.support.training import build_here

FLAGS = "--hybrid-layer-pattern M- --global-batch-size 2 --eval-iters 1"


def evaluated(flags: str) -> list[int]:
    """Iterations that a run evaluates after."""
    run, found = build_here(f"{FLAGS} {flags}"), []
    evaluate = run.step.evaluate

    def noted(reader: BatchReader, batches: int, iteration: int, consumed: int) -> dict[str, float]:
        found.append(iteration)
        return evaluate(reader, batches, iteration, consumed)

    run.step.evaluate = noted
    run_training(run, time.monotonic())
    return found


def test_evaluations_by_interval_and_at_the_end() -> None:
    assert evaluated("--eval-interval 3") == [3, 6, 8]
    assert evaluated("--eval-interval 3 --start-eval-at-iter 4") == [6, 8]
    assert evaluated("--eval-interval 2 --start-eval-at-iter 4 --manual-gc --manual-gc-interval 1") == [4, 6, 8]
    assert gc.isenabled()


def test_evaluation_alone() -> None:
    assert evaluated("--eval-interval 3 --skip-train") == [0]
    with pytest.raises(ConfigError, match="--skip-train without --eval-interval"):
        build_here(f"{FLAGS} --skip-train")
    with pytest.raises(ConfigError, match="something to do"):
        build_here(f"{FLAGS} --skip-train --eval-interval 3 --eval-iters 0")


@pytest.mark.parametrize("iterations", range(1, 25))
def test_enough_validation_samples_are_asked_for(iterations: int) -> None:
    for interval in (1, 3, 10):
        for start in (None, 1, 4, 10, 20):
            happening = sum(
                (i % interval == 0 or i == iterations) and i >= (start or 0) for i in range(1, iterations + 1)
            )
            valid = requested_sizes(
                train_samples=0,
                train_iters=iterations,
                eval_iters=2,
                eval_interval=interval,
                global_batch_size=5,
                start_eval_at_iter=start,
            )[1]
            megatron = iterations // interval + 1 - (start or 0) // interval
            assert valid == 10 * max(megatron, happening, 1)


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(1))
    return found


def test_garbage_is_collected_when_asked_for(collections: list[int]) -> None:
    control = GarbageControl(TrainingConfig(manual_gc=True, manual_gc_interval=2))
    assert (len(collections), gc.isenabled()) == (1, False)
    for iteration in range(1, 6):
        control.after_step(iteration)
    assert len(collections) == 3
    with control.around_evaluation():
        assert len(collections) == 4
    assert len(collections) == 5
    control.release()
    assert gc.isenabled()


def test_garbage_is_left_to_python_otherwise(collections: list[int]) -> None:
    for training in (TrainingConfig(manual_gc_interval=1), TrainingConfig()):
        control = GarbageControl(training)
        control.after_step(1)
        with control.around_evaluation():
            assert gc.isenabled()
        control.release()
    assert collections == []
    quiet = GarbageControl(TrainingConfig(manual_gc=True, manual_gc_eval=False))
    with quiet.around_evaluation():
        pass
    quiet.release()
    assert len(collections) == 1
