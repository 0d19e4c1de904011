"""Which iterations are evaluated after, evaluation without training, and when garbage is collected."""

from __future__ import annotations

import gc
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.splits import requested_sizes
from megatron.training.config.training import TrainingConfig
from megatron.training.data.batches import BatchReader
from megatron.training.loop.garbage import GarbageControl
from megatron.training.loop.pretrain import run_training
from megatron.training.observe.curves import CurvesPicture
from megatron.training.observe.fingerprint import FingerprintWriter
from megatron.training.observe.log_line import LogLineFormat
from megatron.training.observe.observers import LogLines
from megatron.training.observe.step_record import StepMetrics
from tests.support.data import write_self_data
from tests.support.training import TINY, build_here

FLAGS = "--hybrid-layer-pattern M- --global-batch-size 2 --eval-iters 1"


def evaluated(flags: str) -> list[int]:
    """Iterations that a run evaluates after; with the test data once more after the last."""
    run, found = build_here(f"{FLAGS} {flags}"), []
    evaluate = run.step.evaluate

    def noted(reader: BatchReader, batches: int, iteration: int, consumed: int) -> dict[str, float]:
        found.append(iteration)
        return evaluate(reader, batches, iteration, consumed)

    run.step.evaluate = noted
    run_training(run, time.monotonic())
    return found


def test_evaluations_by_interval_and_at_the_end() -> None:
    assert evaluated("--eval-interval 3") == [3, 6, 8, 8]
    assert evaluated("--eval-interval 3 --start-eval-at-iter 4") == [6, 8, 8]
    assert evaluated("--eval-interval 2 --start-eval-at-iter 4 --manual-gc --manual-gc-interval 1") == [4, 6, 8, 8]
    assert gc.isenabled()


def test_evaluation_alone() -> None:
    assert evaluated("--eval-interval 3 --skip-train") == [0, 0]
    with pytest.raises(ConfigError, match="--skip-train without --eval-interval"):
        build_here(f"{FLAGS} --skip-train")
    with pytest.raises(ConfigError, match="something to do"):
        build_here(f"{FLAGS} --skip-train --eval-interval 3 --eval-iters 0")


@pytest.mark.parametrize(
    ("data", "read"),
    [
        ("--valid-data-path {} --test-data-path {}", ["valid", "test"]),
        ("--valid-data-path {}", ["valid"]),
        ("--valid-data-path {} --full-validation", ["valid"]),
        ("--test-data-path {}", ["test"]),
        ("--data-path {} --split 0,6,6", ["valid", "test"]),
        ("--data-path {} --split 6,6,0", ["valid"]),
    ],
)
def test_evaluation_alone_takes_no_training_data(
    tmp_path: Path, data: str, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_self_data(tmp_path, [65] * 12, vocab_size=4096).prefix
    flags = f"{FLAGS} --vocab-size 4096 --skip-train --eval-interval 8 --run-dir {tmp_path}/run"
    base = TINY.replace("--mock-data", data.replace("{}", path))
    run_training(build_here(flags, base), time.monotonic())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == read
    assert ("--full-validation: 12 sequences each time" in capsys.readouterr().out) == ("--full" in data)
    if data.startswith("--valid"):
        with pytest.raises(ConfigError, match=r"no train data \(left out by --train-data-path\)"):
            build_here(flags.replace("--skip-train", ""), base)


@pytest.mark.parametrize("data", ["--train-data-path {}", "--data-path {} --split 1,0,0"])
def test_evaluation_alone_of_nothing_is_refused(tmp_path: Path, data: str) -> None:
    path = write_self_data(tmp_path, [65] * 12, vocab_size=4096).prefix
    left_out = r"\(left out by --\S+\)"
    text = f"--skip-train without valid data {left_out} and test data {left_out}; needed: data to evaluate on; change: "
    with pytest.raises(ConfigError, match=text):
        build_here(
            f"{FLAGS} --vocab-size 4096 --skip-train --eval-interval 8", TINY.replace("--mock-data", data.format(path))
        )


def test_test_data_are_evaluated_once_training_is_over(tmp_path: Path) -> None:
    flags = f"--eval-interval 8 --save {tmp_path}/saved --save-interval 5 --run-dir {tmp_path}/run"
    assert evaluated(f"{flags} --exit-interval 4") == []
    assert evaluated(f"{flags} --load {tmp_path}/saved") == [8, 8]
    assert evaluated(f"{flags} --load {tmp_path}/saved") == []
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if record["kind"] == "test"] == [8]


def test_an_exit_after_the_last_step_keeps_no_test_data_back() -> None:
    assert evaluated("--eval-interval 8 --train-iters 3 --exit-interval 3") == [3, 3]


def test_test_data_that_came_out_empty_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_self_data(tmp_path, [65] * 40, vocab_size=4096).prefix
    base = TINY.replace("--mock-data", f"--data-path {prefix}")
    for split, said in (("969,30,1", 1), ("1,1,0", 0), ("1,1,1", 0)):
        flags = f"{FLAGS} --vocab-size 4096 --train-iters 3 --eval-interval 3 --split {split}"
        run_training(build_here(flags, base), time.monotonic())
        assert capsys.readouterr().out.count("nothing is evaluated at the end of training") == said


def test_the_last_checkpoint_is_written_before_the_test_data_are_read(tmp_path: Path) -> None:
    run, there = build_here(f"{FLAGS} --eval-interval 8 --save {tmp_path} --save-interval 5"), []
    evaluate = run.step.evaluate

    def noted(*args: Any) -> dict[str, float]:
        there.append((tmp_path / "iter_0000008").is_dir())
        return evaluate(*args)

    run.step.evaluate = noted
    run_training(run, time.monotonic())
    assert there == [False, True]


def test_the_first_step_of_a_launch_and_every_interval_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines(LogLineFormat(train_iters=9, world_size=1), 3)
    for iteration in range(5, 10):
        lines.on_step(StepMetrics(iteration=iteration, consumed_samples=iteration, global_batch_size=1, num_tokens=1))
    assert re.findall(r"iteration +(\d+)/", capsys.readouterr().out) == ["5", "6", "9"]


def test_lines_say_which_data_were_evaluated() -> None:
    out = io.StringIO()
    lines = LogLines(LogLineFormat(train_iters=8, world_size=1), 1, out)
    lines.on_evaluation("valid", 7, 70, {"lm loss": 2.0})
    lines.on_evaluation("test", 8, 80, {"lm loss": 21.0})
    assert (
        " validation loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |" in out.getvalue()
    )
    assert " validation loss at iteration 8 on test set | lm loss value: 2.100000E+01 |" in out.getvalue()


def test_data_that_end_before_the_last_evaluation_are_refused(tmp_path: Path) -> None:
    """A blend without weights is as large as its members: it does not grow with what is asked of it. Nothing is written
    that the next try would have to account for."""
    prefixes = [write_self_data(tmp_path, [65] * 12, vocab_size=4096, name=name).prefix for name in "ab"]
    base = TINY.replace("--mock-data", f"--data-path {' '.join(prefixes)}")
    flags = f"{FLAGS} --train-iters 3 --vocab-size 4096 --eval-interval 1"
    cases = (
        ("--split 8,4,0", "validation", r"--eval-iters or evaluations \(--eval-interval\)"),
        ("--split 6,5,1 --eval-interval 3", "test", "--eval-iters$"),
        ("--split 1,6,5 --train-iters 40 --eval-interval 40", "training", "--train-iters or --train-samples"),
    )
    for words, short, fewer in cases:
        folders = f"--fingerprint-dir {tmp_path}/new/a --run-dir {tmp_path}/new/b --trace-dir {tmp_path}/new/c"
        run = build_here(f"{flags} --eval-iters 2 {words} {folders}", base)
        text = rf"given \d+ {short} samples; needed: \d+ after the 0 consumed already"
        with pytest.raises(ConfigError, match=rf"{text}; change: more {short} data, or fewer {fewer}"):
            run_training(run, time.monotonic())
    assert not (tmp_path / "new").exists()
    run_training(build_here(f"{flags} --eval-iters 1 --split 8,4,0", base), time.monotonic())


def test_an_observer_that_fails_keeps_nothing_else_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(picture: CurvesPicture) -> None:
        raise OSError("disk full")

    closed: list[object] = []
    monkeypatch.setattr(CurvesPicture, "close", fail)
    for kind in (FingerprintWriter, BatchReader):
        monkeypatch.setattr(kind, "close", lambda part: closed.append(type(part)))
    run = build_here(f"{FLAGS} --train-iters 3 --run-dir {tmp_path}/run --fingerprint-dir {tmp_path}/fingerprint")
    with pytest.raises(OSError, match="disk full"):
        run_training(run, time.monotonic())
    assert closed == [FingerprintWriter, BatchReader]


def test_data_that_an_earlier_launch_has_read_are_refused(tmp_path: Path) -> None:
    """The second launch asks for one evaluation's samples; the first one's are consumed."""
    base = TINY.replace("--mock-data", f"--data-path {write_self_data(tmp_path, [65] * 40, vocab_size=4096).prefix}")
    flags = f"{FLAGS} --vocab-size 4096 --eval-iters 4 --split 1,1,0 --save {tmp_path}/saved --save-interval 4"
    run_training(build_here(f"{flags} --eval-interval 1 --exit-interval 4", base), time.monotonic())
    run = build_here(f"{flags} --eval-interval 8 --load {tmp_path}/saved", base)
    with pytest.raises(ConfigError, match=r"validation samples; needed: 8 after the 32 consumed already"):
        run_training(run, time.monotonic())


def test_batches_of_their_own_size() -> None:
    """Two of training's size, or one of twice as many samples, cut in another way: the same samples."""
    plain = build_here(f"{FLAGS} --eval-interval 2 --eval-iters 2")
    sized = build_here(f"{FLAGS} --eval-interval 2 --eval-iters 1 --eval-global-batch-size 4 --eval-micro-batch-size 2")
    shape = sized.step.shape.evaluation
    assert (shape.batches, shape.batch_size, shape.stride, shape.micro_batch_size) == (1, 4, 2, 2)
    dataset, losses = plain.splits.valid, []
    for run in (plain, sized):
        run = replace(run, splits=replace(run.splits, valid=dataset))
        reader = run.valid_reader()
        assert reader is not None
        losses.append(run.step.evaluate(reader, run.step.shape.evaluation.batches, 0, 0)["lm loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != plain.step.evaluate(plain.valid_reader(), 1, 0, 0)["lm loss"]


def test_position_in_the_validation_data_counts_their_samples(tmp_path: Path) -> None:
    seen = consumed_at_the_end("--eval-interval 3 --eval-global-batch-size 6", tmp_path / "a")
    assert seen == 3 * 6
    assert consumed_at_the_end("--eval-interval 3 --full-validation", tmp_path / "b", data=True) == 0


def consumed_at_the_end(flags: str, folder: Path, data: bool = False) -> int:
    """Validation samples behind a run, as its last checkpoint has it."""
    folder.mkdir()
    base = TINY
    if data:
        flags += f" --data-path {write_self_data(folder, [65] * 12, vocab_size=4096).prefix} --split 1,1,0"
        flags += " --vocab-size 4096"
        base = TINY.replace("--mock-data", "")
    run = build_here(f"{FLAGS} {flags} --save {folder} --save-interval 100", base)
    run_training(run, time.monotonic())
    return json.loads((folder / "iter_0000008" / "metadata.json").read_text())["consumed_valid_samples"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval-interval 2 --eval-micro-batch-size 4", r"batch of 2 sequences with 4 .* a multiple of 4 \* 1 = 4"),
        ("--eval-interval 2 --eval-global-batch-size 3 --logical-data-parallel-size 2", "a multiple of 1 \\* 2 = 2"),
        ("--eval-interval 2 --eval-global-batch-size 0", "--eval-global-batch-size 0; needed: at least 1"),
        ("--full-validation", "--full-validation without --eval-interval"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_here(f"{FLAGS} {flags}")


@pytest.mark.parametrize("flag", ["", "--full-validation", "--skip-train --full-validation"])
def test_evaluations_without_validation_data_are_refused(flag: str, tmp_path: Path) -> None:
    prefix = write_self_data(tmp_path, [65] * 12, vocab_size=4096).prefix
    base = TINY.replace("--mock-data", f"--data-path {prefix} --split 1,0,0")
    with pytest.raises(
        ConfigError, match=r"without validation data \(.*change: --split or --valid-data-path, or leave"
    ):
        build_here(f"{FLAGS} --vocab-size 4096 --eval-interval 2 --eval-iters 1 {flag}", base)
    assert build_here(f"{FLAGS} --vocab-size 4096 --eval-interval 2 --eval-iters 0", base).splits.valid is None


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
