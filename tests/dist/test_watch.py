"""A loss that is not finite stops every rank in the same step, names the place, and leaves the state as it was."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.digest.bits import digest_hex
from tests.support.ranks import run_ranks
from tests.support.training import build_here

LAYOUTS = {
    "DP2": (2, "--global-batch-size 4", "ME*-"),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", "ME*-"),
    "PP2": (2, "--pipeline-model-parallel-size 2 --global-batch-size 4", "ME|*-"),
    "EP2": (2, "--expert-model-parallel-size 2 --global-batch-size 4", "ME*-"),
    "losses are not looked at": (2, "--global-batch-size 4 --no-check-for-nan-in-loss-and-grad", "ME*-"),
}


def _poisoned_step(flags: str, poison: bool) -> tuple[str, bool, int, list[float]]:
    """A good step, then one in which a token that only the last logical shard reads has NaN as its embedding."""
    run = build_here(flags)
    reader, step = run.reader(run.splits.train), run.step
    first = step.run(reader, 1, 0)
    consumed, shards = first.consumed_samples, run.layout.ldp
    seen = [set(_tokens(run, consumed, shard).tolist()) for shard in range(shards)]
    only_there = sorted(seen[-1] - set().union(*seen[:-1])) if shards > 1 else sorted(seen[0])
    for chunk in run.chunks:
        for param in chunk.model_parameters():
            if poison and param.spec.name == "embedding.word_embeddings.weight":
                _poison_row(param, only_there[-1])
    before = {k: digest_hex(v) for k, v in step.optimizer.state_digests().items() if k != "params"}
    count = step.optimizer.step_count
    try:
        step.run(reader, 2, consumed)
        message = ""
    except TrainingStoppedError as error:
        message = str(error)
    after = {k: digest_hex(v) for k, v in step.optimizer.state_digests().items() if k != "params"}
    return message, before == after, step.optimizer.step_count - count, [first.losses["lm loss"], first.grad_norm]


def _tokens(run, consumed: int, shard: int) -> torch.Tensor:
    sampler = run.reader(run.splits.train)._sampler
    return torch.cat(
        [
            torch.from_numpy(run.splits.train[int(number)]["tokens"])
            for index in range(run.step.shape.batch_sizes.at(consumed) // run.step.shape.stride)
            for number in sampler.micro_batch(consumed, shard, index)
        ]
    )


def _poison_row(param, token: int) -> None:
    ((start, stop), _) = param.spec.shards[0].boxes[0]
    if start <= token < stop:
        param.data[token - start] = float("nan")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_stops_and_nothing_moved(name: str) -> None:
    world, flags, pattern = LAYOUTS[name]
    ranks = run_ranks(world, _poisoned_step, f"--hybrid-layer-pattern '{pattern}' {flags}", True)
    messages = {message for message, *_ in ranks}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert "iteration 2" in message
    assert "rank 1" in message or name == "TP2"
    assert all(way_out in message for way_out in ("--load", "--lr", "--trace-iterations 2"))
    assert all(unmoved and steps == 0 for _, unmoved, steps, _ in ranks)
    assert len({tuple(numbers) for *_, numbers in ranks}) == 1


def test_without_poison_the_step_is_taken() -> None:
    world, flags, pattern = LAYOUTS["DP2"]
    ranks = run_ranks(world, _poisoned_step, f"--hybrid-layer-pattern '{pattern}' {flags}", False)
    assert all(not message and not unmoved and steps == 1 for message, unmoved, steps, _ in ranks)


def _poisoned_evaluation(flags: str) -> str:
    """An evaluation behind a step that left NaN in the weights."""
    run = build_here(f"{flags} --eval-interval 1 --eval-iters 1")
    run.step.run(run.reader(run.splits.train), 1, 0)
    for chunk in run.chunks:
        for param in chunk.model_parameters():
            param.data.fill_(float("nan"))
    with pytest.raises(TrainingStoppedError) as stopped:
        run.step.evaluate(run.valid_reader(), 1, 1, 0)
    return str(stopped.value)


def test_an_evaluation_that_stops_does_not_say_that_the_step_was_not_taken() -> None:
    world, flags, pattern = LAYOUTS["DP2"]
    (message,) = set(run_ranks(world, _poisoned_evaluation, f"--hybrid-layer-pattern '{pattern}' {flags}"))
    assert message.startswith(
        "evaluation after iteration 1: the loss of logical shard 0, micro-batch 0 is nan (rank 0)"
    )
    assert "iteration before" not in message
    assert "--ckpt-step" in message
