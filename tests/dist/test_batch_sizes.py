"""A batch size that grows: the sizes of the steps, the same bits on any pipeline, and a start from the middle."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.digest.bits import digest_hex
from tests.support.ranks import run_ranks
from tests.support.training import TINY, Trained, build_here, train

BASE = TINY.replace("--train-iters 8", "--train-samples 40").replace("--lr-warmup-iters 2", "--lr-warmup-samples 4")
RAMP = "--rampup-batch-size 2 2 8 --global-batch-size 6 --logical-data-parallel-size 2"
SIZES, CONSUMED = [2, 2, 4, 6, 6], [2, 4, 8, 14, 20]


def grown(pattern: str, flags: str) -> Trained:
    return train(f"--hybrid-layer-pattern {pattern} {RAMP} {flags}", len(SIZES), BASE)


def seen(trained: Trained) -> tuple[list[str], dict[str, str]]:
    """Losses and norms as hex floats, and the digests of the state."""
    values = [v.hex() for step in trained.steps for v in (step.losses["lm loss"], step.grad_norm, step.learning_rate)]
    return values, trained.digests


def test_sizes_follow_the_ramp_and_no_layout_changes_a_bit() -> None:
    """Two stages of two chunks each pass through one, two and three micro-batches a shard."""
    one = grown("'M|-|*|E'", "")
    assert [step.global_batch_size for step in one.steps] == SIZES
    assert [step.consumed_samples for step in one.steps] == CONSUMED
    interleaved = run_ranks(2, grown, "'M|-|*|E'", "--pipeline-model-parallel-size 2")
    assert {str(seen(trained)) for trained in interleaved} == {str(seen(one))}


def test_steps_depend_on_what_was_consumed_alone() -> None:
    """Another run that goes on from the same weights and position takes the same steps."""
    flags = f"--hybrid-layer-pattern M-|*E {RAMP}"
    straight, broken = build_here(flags, BASE), build_here(flags, BASE)
    reader = straight.reader(straight.splits.train)
    position = 0
    for iteration in range(1, 6):
        position = straight.step.run(reader, iteration, position).consumed_samples
    position = 0
    for iteration in range(1, 6):  # a new reader for every step, as after a restart
        position = broken.step.run(broken.reader(broken.splits.train), iteration, position).consumed_samples
    totals = [
        {name: digest_hex(total) for name, total in run.step.optimizer.state_digests().items()}
        for run in (straight, broken)
    ]
    assert totals[0] == totals[1]


def test_schedule_in_tokens_gives_the_same_steps_as_the_ramp() -> None:
    """64 tokens a sequence: the ramp's 0, 4 and 8 samples."""
    schedule = "--step-batch-size-schedule '0:2 256:4 512:6' --logical-data-parallel-size 2"
    run = build_here(f"--hybrid-layer-pattern M- {schedule}", BASE)
    assert run.step.shape.batch_sizes.steps == ((0, 2), (4, 4), (8, 6))
    assert run.config.training.train_iters == 3 + (40 - 8) // 6
    assert run.config.training.global_batch_size == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rampup-batch-size 2 3 8 --global-batch-size 8", "with a batch of 5"),
        ("--rampup-batch-size 2 4 8 --global-batch-size 8", "do not lead from 2 to 8"),
        ("--rampup-batch-size 2 2 --global-batch-size 8", "2 numbers instead of"),
        ("--rampup-batch-size 2 2 8", "the size it leads to"),
        ("--step-batch-size-schedule '0:2 256:3'", "with a batch of 3"),
        ("--step-batch-size-schedule '1:2'", "the first threshold is not 0"),
        ("--step-batch-size-schedule 0:2 --global-batch-size 4", "leave out --global-batch-size"),
        ("--step-batch-size-schedule 0:2 --rampup-batch-size 2 2 8", "one of the two"),
    ],
)
def test_refused_before_anything_is_built(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_here(f"--hybrid-layer-pattern M- --logical-data-parallel-size 2 {flags}", BASE)
    assert message in str(refused.value)


def test_iterations_do_not_count_a_growing_batch() -> None:
    with pytest.raises(ConfigError, match="in a run counted by --train-iters"):
        build_here("--hybrid-layer-pattern M- --rampup-batch-size 2 2 8 --global-batch-size 4")
