"""Controls: a restore that leaves out one part of the state is caught, outside of that part where it acts there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.determinism.checkpoint import diff_checkpoints
from megatron.training.checkpoint import checkpointer, restore
from megatron.training.checkpoint.position import Position
from megatron.training.checkpoint.restore import Start
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, differing_fields, rank_file, read_lines
from tests.support.legs import run_legs

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = "--bf16 --hidden-dropout 0.1 --eval-interval 3"
MIDDLE = 4

# What differs, at the latest at the last step, in the fingerprint's lines.
COMPONENTS = {
    "main_params": {"params", "lm_loss"},
    "exp_avg": {"params", "lm_loss"},
    "exp_avg_sq": {"params", "lm_loss"},
    "expert_bias": {"params", "lm_loss"},
    "step_count": {"params", "lm_loss"},
    "schedule": {"learning_rate", "params"},
    "data": {"consumed_samples", "data", "lm_loss"},
    "iteration": {"consumed_samples", "lm_loss"},
    "working_weights": {"params", "lm_loss"},
}


def leave_out(component: str) -> None:
    """Plant the fault in this process: one part of the state is as a fresh start has it."""
    if component in ("main_params", "exp_avg", "exp_avg_sq", "expert_bias"):
        restore.load_pieces = functools.partial(_load_without, restore.load_pieces, f"{component}.")
    elif component == "step_count":
        Optimizer.complete_state = functools.partialmethod(_without_steps, Optimizer.complete_state)
    elif component == "working_weights":
        Optimizer.complete_state = lambda self: None
        Optimizer.weights_unlike_masters = lambda self: []
    elif component == "generators":
        checkpointer.put_back_generators = lambda start: None
    elif component == "generators of other ranks":
        checkpointer.put_back_generators = functools.partial(_put_back_of_first, checkpointer.put_back_generators)
    elif component == "valid":
        _change_start(lambda start: replace(start, position=replace(start.position, consumed_valid_samples=0)))
    elif component == "schedule":
        _change_start(lambda start: replace(start, schedule_start=start.position.consumed_train_samples))
    elif component == "data":
        _change_start(lambda start: replace(start, position=_rewound(start.position), schedule_start=-16))
    elif component == "iteration":
        _change_start(lambda start: replace(start, position=replace(start.position, iteration=MIDDLE + 1)))


def _put_back_of_first(put_back: Callable, start: Start) -> None:
    """One copy for everybody, as if generators were replicas."""
    states = [start.generators]
    dist.broadcast_object_list(states, src=0)
    put_back(replace(start, generators=states[0]))


def _rewound(position: Position) -> Position:
    return replace(position, consumed_train_samples=0)


def _load_without(load: Callable, prefix: str, folder, facts, wanted, group) -> None:
    """Load, then put the old values of one kind back."""
    before = [piece.values.clone() for piece in wanted]
    load(folder, facts, wanted, group)
    for piece, values in zip(wanted, before, strict=True):
        if piece.key.startswith(prefix):
            piece.values.copy_(values)


def _without_steps(self: Optimizer, complete: Callable) -> None:
    self.step_count = 0
    complete(self)


def _change_start(change: Callable) -> None:
    checkpointer.restore = functools.partial(_restored, checkpointer.restore, change)


def _restored(original: Callable, change: Callable, *args, **kwargs):
    return change(original(*args, **kwargs))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that saved after 4 and 8."""
    folder = tmp_path_factory.mktemp("straight")
    words = f"{WORDS} --save {folder}/checkpoints --save-interval {MIDDLE} --fingerprint-dir {folder}/fingerprint"
    (ended,) = run_legs(1, words)
    assert ended.code == 0, ended.error
    return folder


def resumed_with(straight: Path, folder: Path, component: str) -> Path:
    """The second half again, with one part of the state left out."""
    words = (
        f"{WORDS} --load {straight}/checkpoints --ckpt-step {MIDDLE} --save {folder}/checkpoints --save-interval 100 "
        f"--fingerprint-dir {folder}/fingerprint"
    )
    (ended,) = run_legs(1, words, functools.partial(leave_out, component))
    assert ended.code == 0, ended.error
    return folder


def differing(straight: Path, resumed: Path, name: str = FINGERPRINT_FILE) -> set[str]:
    """Fields in which any common line differs."""
    one, other = (read_lines(leg / "fingerprint" / name) for leg in (straight, resumed))
    return {field for i in one.keys() & other.keys() for field in differing_fields(one[i], other[i])}


def test_nothing_left_out_is_no_difference(straight: Path, tmp_path: Path) -> None:
    resumed = resumed_with(straight, tmp_path, "nothing")
    assert differing(straight, resumed) == set()
    assert differing(straight, resumed, rank_file(0)) == set()
    assert diff_checkpoints(straight / "checkpoints", resumed / "checkpoints").exit == 0


@pytest.mark.parametrize("component", COMPONENTS)
def test_part_that_is_left_out_shows_elsewhere(straight: Path, tmp_path: Path, component: str) -> None:
    assert COMPONENTS[component] <= differing(straight, resumed_with(straight, tmp_path, component))


def test_generators_show_in_the_rank_file_and_in_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    """Training draws from keys, so no loss depends on the generators; users' code may."""
    resumed = resumed_with(straight, tmp_path, "generators")
    assert differing(straight, resumed) == set()
    assert differing(straight, resumed, rank_file(0)) == {"rng"}
    outcome = diff_checkpoints(straight / "checkpoints", resumed / "checkpoints")
    names = ("numpy", "python", "torch_cpu")
    assert list(outcome.facts["differences"]) == [f"generators.rank_00000.{name}" for name in names]


def test_validation_position_shows_in_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    outcome = diff_checkpoints(straight / "checkpoints", resumed_with(straight, tmp_path, "valid") / "checkpoints")
    assert outcome.exit == 1
    assert list(outcome.facts["differences"]) == ["consumed_valid_samples"]


def test_generators_of_another_rank_show_on_the_rank_that_got_them(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    words = f"{WORDS} --save-interval {MIDDLE}"
    for folder, more, before in (
        (straight, "", None),
        (
            resumed,
            f"--load {straight}/checkpoints --ckpt-step {MIDDLE}",
            functools.partial(leave_out, "generators of other ranks"),
        ),
    ):
        places = f"--save {folder}/checkpoints --fingerprint-dir {folder}/fingerprint"
        assert [rank.code for rank in run_legs(2, f"{words} {places} {more}", before)] == [0, 0]
    assert differing(straight, resumed, rank_file(0)) == set()
    assert differing(straight, resumed, rank_file(1)) == {"rng"}
