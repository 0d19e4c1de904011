"""Rules of a resume, by what a run does: schedule, switches, exits, retention, errors."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.config.errors import SaveFailedError, TrainingStoppedError
from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup
from megatron.core.dist_checkpointing.folder import (
    MARKER_FILE,
    complete_iterations,
    iteration_folder,
    newest_iteration,
    part_folder,
    start_part,
)
from megatron.core.dist_checkpointing.save import SaveRequest
from megatron.core.dist_checkpointing.stored import StoredCheckpoint
from megatron.core.optimizer.optimizer_param_scheduler import Schedule, learning_rate, weight_decay
from megatron.determinism.checkpoint import diff_checkpoints
from megatron.training.checkpoint import checkpointer
from megatron.training.config.manifest import read_manifest
from megatron.training.loop.step import TrainStep
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, read_lines
from tests.support.legs import Ended, finished, leg, run_legs, with_data
from tests.support.ranks import run_ranks

QUICK = "--eval-iters 0 --log-interval 1"
COSINE = Schedule(
    max_lr=1e-2,
    min_lr=0.0,
    warmup_init=0.0,
    warmup_samples=8,
    decay_style="cosine",
    decay_samples=32,
    wsd_decay_style="exponential",
    wsd_decay_samples=0,
    start_wd=0.1,
    end_wd=0.2,
    wd_incr_style="cosine",
    wd_incr_samples=32,
)

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOWER = "--lr 5e-3"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 4 and 8 of one rank."""
    folder = tmp_path_factory.mktemp("saved")
    finished(1, f"{QUICK} --save {folder} --save-interval 4")
    return folder


def rates(folder: Path) -> dict[int, float]:
    """Learning rate used by each step, from the fingerprint."""
    return {i: float.fromhex(str(line["learning_rate"])) for i, line in read_lines(folder / FINGERPRINT_FILE).items()}


@pytest.mark.parametrize(
    ("flags", "max_lr", "start", "steps"),
    [
        ("", 1e-2, 0, (5, 8)),
        (f"{LOWER} --override-opt-param-scheduler", 5e-3, 0, (5, 8)),
        (f"{LOWER} --use-checkpoint-opt-param-scheduler", 1e-2, 0, (5, 8)),
        (f"{LOWER} --no-load-optim", 5e-3, 16, (5, 8)),
        (f"{LOWER} --finetune", 5e-3, 0, (1, 8)),
    ],
)
def test_learning_rate_and_weight_decay_of_every_step_after_a_resume(
    saved: Path, tmp_path: Path, flags: str, max_lr: float, start: int, steps: tuple[int, int]
) -> None:
    finished(1, f"{QUICK} --load {saved} --ckpt-step 4 {flags} --fingerprint-dir {tmp_path} --run-dir {tmp_path}/run")
    schedule = Schedule(**{name: getattr(COSINE, name) for name in Schedule.__slots__} | {"max_lr": max_lr})
    expected = {i: learning_rate(schedule, 4 * (i - 1) - start) for i in range(steps[0], steps[1] + 1)}
    assert rates(tmp_path) == expected
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    decays = {line["iteration"]: line["weight_decay"] for line in lines if line["kind"] == "train"}
    assert decays == {i: weight_decay(schedule, 4 * (i - 1) - start) for i in expected}


def test_position_on_a_late_schedule_survives_a_second_resume(saved: Path, tmp_path: Path) -> None:
    words = f"{QUICK} --save {tmp_path}/c --save-interval 100 --fingerprint-dir {tmp_path}/f"
    finished(1, f"{words} --load {saved} --ckpt-step 4 --no-load-optim --exit-interval 6")
    assert StoredCheckpoint(tmp_path / "c").facts["schedule_position"] == 8
    (manifest,) = [read_manifest(tmp_path / "f")["trajectory"]["branches"]]
    assert [branch["why"] for branch in manifest] == [["--no-load-optim"]]
    finished(1, f"{words} --load {tmp_path}/c")
    assert rates(tmp_path / "f") == {i: learning_rate(COSINE, 4 * (i - 1) - 16) for i in range(5, 9)}
    stored = StoredCheckpoint(tmp_path / "c").facts
    assert stored["step_count"] == 4
    assert stored["branches"] == manifest


def test_conflicting_schedule_is_refused_before_anything_is_read(saved: Path) -> None:
    (ended,) = run_legs(1, f"{QUICK} --load {saved} {LOWER}")
    assert ended.code == 2
    assert "another schedule: --lr: 0.005" in ended.error
    assert "that of" in ended.error and ": --lr: 0.01" in ended.error


def test_stored_schedule_is_the_whole_one(saved: Path) -> None:
    stored = StoredCheckpoint(iteration_folder(saved, 4)).facts["schedule"]
    assert Schedule(**stored) == COSINE
    assert weight_decay(COSINE, 16) == pytest.approx(0.15)


SWITCHES = {
    "": ("", "--no-load-rng", "--no-load-optim --no-load-rng"),
    "--no-save-optim": ("", "--no-load-optim", "--finetune"),
    "--no-save-optim --no-save-rng": ("--no-load-optim", "--no-load-optim --no-load-rng", "--no-load-rng"),
}


@pytest.mark.parametrize("saving", SWITCHES)
def test_switches_of_saving_and_loading_are_independent(tmp_path: Path, saving: str) -> None:
    finished(1, f"{QUICK} --save {tmp_path}/c --save-interval 100 --exit-interval 1 {saving}")
    for loading in SWITCHES[saving]:
        (ended,) = run_legs(1, f"{QUICK} --load {tmp_path}/c --exit-interval 2 {loading}")
        refused = "--no-save-optim" in saving and "--no-load-optim" not in loading and loading != "--finetune"
        assert ended.code == (2 if refused else 0), ended.error
        if refused:
            assert "--no-load-optim or --finetune" in ended.error
        elif "--no-save-rng" in saving and "--no-load-rng" not in loading and loading != "--finetune":
            assert "as the seed sets them: the checkpoint has none (--no-save-rng)" in ended.out


def test_finished_run_started_again_ends_at_once(saved: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    out = finished(1, f"{QUICK} --load {saved} --save {saved} --save-interval 4")
    assert "nothing is left to train: iteration 8 is reached, 8 iterations (32 samples) were asked for" in out
    assert "saving checkpoint" not in out
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before


def test_checkpoints_of_a_run_that_is_not_gone_on_with_are_left_alone(saved: Path, tmp_path: Path) -> None:
    """What only shows later than the settings: here that the weights come from a checkpoint."""
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    words = f"{QUICK} --load {saved} --finetune --save-interval 4 --exit-interval 1 --run-dir {tmp_path}/run"
    (ended,) = run_legs(1, f"{words} --save {saved}")
    assert ended.code == 2
    there = "the run there started from the seed and kept its settings"
    assert f"{there}, this one took over the checkpoint of iteration 8 (--finetune); needed" in ended.error
    assert "that are there; or leave out --finetune, to go on with the run that is there" in ended.error
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before
    assert not (tmp_path / "run").exists()
    for _ in range(2):
        out = finished(1, f"{words} --save {tmp_path}/c")
    assert "it takes the place of the checkpoint of iteration 1 that is there" in out
    assert (tmp_path / "run" / "earlier_1" / "metrics.jsonl").exists()


def test_overridden_iteration_takes_its_place_in_the_data(saved: Path, tmp_path: Path) -> None:
    words = f"{QUICK} --load {saved} --ckpt-step 4 --override-ckpt-iteration 6 --fingerprint-dir {tmp_path}"
    finished(1, words)
    lines = read_lines(tmp_path / FINGERPRINT_FILE)
    assert [line["consumed_samples"] for line in lines.values()] == [28, 32]
    assert rates(tmp_path) == {7: learning_rate(COSINE, 16), 8: learning_rate(COSINE, 20)}


def test_changed_settings_are_announced_and_recorded(saved: Path, tmp_path: Path) -> None:
    words = f"{QUICK} --load {saved} --ckpt-step 4 --hidden-dropout 0.1 --fingerprint-dir {tmp_path}"
    out = finished(1, f"{words} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.5 0.25")
    assert "not as in the checkpoint: --hidden-dropout was 0.0, is 0.1" in out
    assert "not as in the checkpoint: --moe-aux-loss-coeff was '0.01', is '0.5 0.25'" in out
    (branch,) = read_manifest(tmp_path)["trajectory"]["branches"]
    assert branch["iteration"] == 4
    assert branch["changed"]["recipe.model.hidden_dropout"] == [0.0, 0.1]
    assert branch["changed"]["recipe.model.moe_aux_loss_coeff"] == [[0.01], [0.5, 0.25]]


def test_flags_that_allow_what_does_not_happen_may_stand_in_the_command(tmp_path: Path) -> None:
    """As in a job that is queued again: nothing has changed, so the run goes on as it was."""
    words = f"{QUICK} --save {tmp_path}/c --load {tmp_path}/c --save-interval 2 --exit-interval 2"
    words += f" --fingerprint-dir {tmp_path}/f"
    for _ in range(2):
        finished(1, f"{words} --override-opt-param-scheduler --new-logical-layout")
    assert list(read_lines(tmp_path / "f" / FINGERPRINT_FILE)) == [1, 2, 3, 4]
    assert "branches" not in read_manifest(tmp_path / "f")["trajectory"]
    (ended,) = run_legs(1, f"{words} --no-load-optim")
    assert ended.code == 2
    assert "or leave out --no-load-optim, to go on with the run that is there" in ended.error


def test_another_model_is_3_and_names_the_setting(saved: Path) -> None:
    (ended,) = run_legs(1, f"{QUICK} --load {saved} --kv-channels 16")
    assert ended.code == 3
    assert "another model: kv_channels is 8 there and 16 here (--kv-channels)" in ended.error
    assert "give the checkpoint's values, or change --load" in ended.error


def test_saves_once_where_interval_and_exit_meet_and_keeps_what_it_should(tmp_path: Path) -> None:
    out = finished(
        1, f"{QUICK} --save {tmp_path} --save-interval 1 --save-retain-interval 2 --exit-interval 5 --async-save"
    )
    assert out.count("saving checkpoint at iteration       5 ") == 1
    assert out.index("successfully saved checkpoint from iteration       5") > out.index("training went on after")
    assert complete_iterations(tmp_path) == [2, 4, 5]
    assert newest_iteration(tmp_path) == 5


def test_asynchronous_files_are_those_of_a_synchronous_save(tmp_path: Path) -> None:
    for name, flag in (("sync", ""), ("async", "--async-save --use-persistent-ckpt-worker")):
        finished(2, f"{QUICK} --bf16 --save {tmp_path / name} --save-interval 2 --exit-interval 5 {flag}")
    for iteration in (2, 4, 5):
        one, other = (iteration_folder(tmp_path / name, iteration) for name in ("sync", "async"))
        names = sorted(path.name for path in one.iterdir())
        assert names == sorted(path.name for path in other.iterdir())
        for name in names:
            if name != "metadata.json":
                assert (one / name).read_bytes() == (other / name).read_bytes(), name
        assert diff_checkpoints(one, other).exit == 0


def send_signal_in_step(number: int) -> None:
    """In the second rank's process: SIGTERM during a step."""
    if dist.get_rank() == 0:
        return
    run = TrainStep.run

    def step(self: TrainStep, reader: object, iteration: int, *args: object, **kwargs: object) -> object:
        if iteration == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, reader, iteration, *args, **kwargs)

    TrainStep.run = step


def test_signal_ends_the_step_saves_and_is_no_error(tmp_path: Path) -> None:
    words = f"{QUICK} --save {tmp_path} --save-interval 2 --async-save --exit-signal-handler"
    ranks = run_legs(2, words, functools.partial(send_signal_in_step, 3))
    assert [rank.code for rank in ranks] == [0, 0]
    assert "exiting program after receiving SIGTERM." in ranks[0].out
    assert newest_iteration(tmp_path) == 3
    assert complete_iterations(tmp_path) == [2, 3]


def limit_file_size(rank: int, file_bytes: int, limit: int) -> None:
    """In one rank's process: no file grows beyond ``limit`` bytes, as on a disk that fills up. In all of them: a share
    is cut into files of ``file_bytes``."""
    writer.FILE_BYTES = file_bytes
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("flag", "file_bytes", "limit"),
    [("", writer.FILE_BYTES, 50_000), ("--async-save", writer.FILE_BYTES, 50_000), ("--async-save", 1 << 14, 20_000)],
    ids=["sync", "async", "async-several-files"],
)
def test_full_disk_on_one_rank_is_named_and_loses_nothing(
    tmp_path: Path, flag: str, file_bytes: int, limit: int
) -> None:
    finished(2, f"{QUICK} --use-distributed-optimizer --save {tmp_path} --save-interval 1 --exit-interval 1")
    before = StoredCheckpoint(tmp_path).facts["digest"]
    words = f"{QUICK} --use-distributed-optimizer --save {tmp_path} --load {tmp_path} --save-interval 1 {flag}"
    ranks = run_legs(2, words, functools.partial(limit_file_size, 1, file_bytes, limit))
    for rank in ranks:
        assert rank.code == 1
        assert "iteration 2 was not saved" in rank.error
        assert "rank 1: " in rank.error
        assert re.search(r"__1_\d.distcp", rank.error)
        assert "rank 0" not in rank.error
    assert newest_iteration(tmp_path) == 1
    assert StoredCheckpoint(tmp_path).facts["digest"] == before


def test_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """By all ranks together: what one machine sees of a folder before it starts is not enough."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for rank in run_legs(2, f"{QUICK} --save {tmp_path}/link/x --save-interval 1"):
        assert rank.code == 2
        assert "rank 0: " in rank.error
        assert "--save" in rank.error
        assert "iteration" not in rank.out


def leg_with_a_disk_of_its_own(words: str, root: Path) -> Ended:
    """Rank function: the second rank finds other things where the first one has its checkpoints."""
    return leg(words.replace(str(root), f"{root}/other") if dist.get_rank() == 1 else words)


@pytest.mark.parametrize("there", ["no checkpoint", "another one"])
def test_ranks_that_do_not_see_the_same_disk_say_so_at_once(tmp_path: Path, there: str) -> None:
    """Instead of a wait that the time-out of a collective ends."""
    (tmp_path / "other").mkdir()
    finished(2, f"{QUICK} --save {tmp_path}/c --save-interval 1 --exit-interval 2")
    if there == "another one":
        shutil.copytree(tmp_path / "c", tmp_path / "other" / "c")
        (tmp_path / "other" / "c" / MARKER_FILE).write_text("1")
    words = with_data(f"{QUICK} --load {tmp_path}/c")
    for rank in run_ranks(2, leg_with_a_disk_of_its_own, words, tmp_path, timeout_s=50):
        assert rank.code == 3
        assert f"ranks do not see the same checkpoints: rank 0: {tmp_path}/c/iter_0000002 with digest" in rank.error
        assert f"; rank 1: {'no checkpoint' if there != 'another one' else tmp_path}" in rank.error


def test_damaged_newest_is_3_on_every_rank_and_an_older_one_can_be_chosen(tmp_path: Path) -> None:
    finished(2, f"{QUICK} --save {tmp_path} --save-interval 2 --exit-interval 4")
    path = iteration_folder(tmp_path, 4) / "__1_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    for rank in run_legs(2, f"{QUICK} --load {tmp_path}"):
        assert rank.code == 3
        assert str(path) in rank.error
    assert "at iteration 2" in finished(2, f"{QUICK} --load {tmp_path} --ckpt-step 2")


def test_snapshot_is_private(tmp_path: Path) -> None:
    """The writer is held back until training has changed every weight: the file still has the older ones."""
    words = f"{QUICK} --save-interval 3 --exit-interval 5"
    finished(1, f"{words} --save {tmp_path}/sync")
    (ended,) = run_legs(
        1, f"{words} --save {tmp_path}/slow --async-save", functools.partial(hold_back, "save_checkpoint")
    )
    assert ended.code == 0, ended.error
    assert ended.out.index("training went on") < ended.out.index("successfully saved checkpoint from iteration       3")
    one, other = (iteration_folder(tmp_path / name, 3) for name in ("sync", "slow"))
    assert diff_checkpoints(one, other).exit == 0


def hold_back(function: str) -> None:
    """In a rank's process: the first call of this function of the checkpointer waits until five steps are taken."""
    late, step, taken = getattr(checkpointer, function), TrainStep.run, threading.Semaphore(0)

    def counted(self: TrainStep, *args: object, **kwargs: object) -> object:
        result = step(self, *args, **kwargs)
        taken.release()
        return result

    def waiting(*args: object) -> None:
        for _ in range(5):
            assert taken.acquire(timeout=60)
        setattr(checkpointer, function, late)
        late(*args)

    TrainStep.run = counted
    setattr(checkpointer, function, waiting)


def test_old_checkpoints_are_deleted_while_training_goes_on(tmp_path: Path) -> None:
    """The deletion behind the save of iteration 6 ends after step 7; the save of iteration 8 waits for it."""
    finished(1, f"{QUICK} --save {tmp_path} --save-interval 1 --save-retain-interval 9 --exit-interval 2")
    words = f"{QUICK} --save {tmp_path} --load {tmp_path} --save-interval 6 --save-retain-interval 18 --exit-interval 8"
    (ended,) = run_legs(1, words, functools.partial(hold_back, "delete_superseded"))
    assert ended.code == 0, ended.error
    assert complete_iterations(tmp_path) == [8]


def fail_the_first_save() -> None:
    """In a rank's process: the disk is full at first."""
    save = checkpointer.save_checkpoint

    def failing(*args: object) -> None:
        checkpointer.save_checkpoint = save
        raise SaveFailedError("iteration 2 was not saved: disk full")

    checkpointer.save_checkpoint = failing


def test_a_save_in_the_background_that_failed_does_not_cost_the_next_one(tmp_path: Path) -> None:
    """The run ends where the error comes up, with what it has reached there on the disk."""
    words = f"{QUICK} --save {tmp_path} --save-interval 2 --async-save"
    for rank in run_legs(2, words, fail_the_first_save):
        assert (rank.code, rank.error) == (1, "iteration 2 was not saved: disk full")
    assert newest_iteration(tmp_path) == 4
    assert complete_iterations(tmp_path) == [4]
    assert "at iteration 4" in finished(2, f"{QUICK} --load {tmp_path}")


def let_another_save(root: Path) -> None:
    """In a rank's process: before the second save, a checkpoint of its iteration is there; another job is so fast."""
    save = checkpointer.save_checkpoint

    def saving(request: SaveRequest, group: CheckpointGroup) -> None:
        if request.iteration == 2 and group.is_first:
            shutil.copytree(iteration_folder(root, 1), iteration_folder(root, 2))
        save(request, group)

    checkpointer.save_checkpoint = saving


def test_what_another_job_saved_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    words = f"{QUICK} --save {tmp_path} --save-interval 1"
    for rank in run_legs(2, words, functools.partial(let_another_save, tmp_path)):
        assert rank.code == 1
        assert f"{iteration_folder(tmp_path, 2)} was saved by another process since this one began" in rank.error
    assert diff_checkpoints(iteration_folder(tmp_path, 1), iteration_folder(tmp_path, 2)).exit == 0


def lose_the_folder(root: Path) -> None:
    """In a rank's process: another job begins a save while this one writes in the background."""
    write = writer.RankWriter.finish

    def finishing(*args: object, **kwargs: object) -> None:
        write(*args, **kwargs)
        start_part(root, 9)

    writer.RankWriter.finish = finishing


def test_who_loses_the_folder_to_another_job_does_not_take_it_back(tmp_path: Path) -> None:
    words = f"{QUICK} --save {tmp_path} --save-interval 2 --async-save"
    for rank in run_legs(2, words, functools.partial(lose_the_folder, tmp_path)):
        assert rank.code == 1
        assert f"{part_folder(tmp_path, 2)} was taken away by another process that saves into {tmp_path}" in rank.error
    assert [path.name for path in tmp_path.glob("iter_*")] == [part_folder(tmp_path, 9).name]


def stop_while_saving(fails: bool) -> None:
    """In a rank's process: training stops itself in step 3, and the save of step 2 is not over before."""
    save, step, stopped = checkpointer.save_checkpoint, TrainStep.run, threading.Event()

    def stopping(self: TrainStep, reader: object, iteration: int, *args: object, **kwargs: object) -> object:
        if iteration == 3:
            stopped.set()
            raise TrainingStoppedError("iteration 3: enough")
        return step(self, reader, iteration, *args, **kwargs)

    def late(*args: object) -> None:
        assert stopped.wait(60)
        if fails:
            raise MemoryError("no room")
        save(*args)

    TrainStep.run, checkpointer.save_checkpoint = stopping, late


def test_a_run_that_stops_itself_ends_the_save_in_the_background_first(tmp_path: Path) -> None:
    words = f"{QUICK} --save {tmp_path} --save-interval 2 --async-save"
    for rank in run_legs(2, words, functools.partial(stop_while_saving, False)):
        assert (rank.code, rank.error) == (4, "iteration 3: enough")
    assert newest_iteration(tmp_path) == 2
    with pytest.raises(AssertionError, match=r"(?s)iteration 3: enough.*MemoryError: no room"):
        run_legs(2, words, functools.partial(stop_while_saving, True))
