"""Whole steps on the rank pool, and what of them must not depend on layout, placement or time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.digest.bits import digest_hex
from megatron.core.process_groups.collectives import sum_integers
from megatron.training.loop import build
from megatron.training.loop.build import Run
from tests.determinism.other_sums import OTHER_SUMS
from tests.support.delays import delay_collectives
from tests.support.training import TINY, build_here

NOISY = (
    "--seq-length 32 --max-position-embeddings 32 --lr-warmup-iters 0 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1"
)
"""Every kind of noise that training draws, and a first step that moves the weights."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step (or an evaluation, ``state`` empty): numbers as hex floats and layout-free digests."""

    numbers: dict[str, str]
    state: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """What must not matter, and one thing that must: ``nodes`` on which ranks pretend to live, a seed for ``delays``
    before every collective on some ranks, and ``sums`` by name, for controls."""

    nodes: tuple[int, ...] | None = None
    delays: int | None = None
    sums: str | None = None


def trajectory(flags: str, steps: int, circumstance: Circumstance | None = None, base: str = TINY) -> list[Seen]:
    """Rank function: ``steps`` steps, then one evaluation."""
    circumstance = circumstance or Circumstance()
    real = build.OrderedSums
    if circumstance.sums is not None:
        build.OrderedSums = OTHER_SUMS[circumstance.sums]
    run = build_here(flags, base, nodes=circumstance.nodes)
    end = None if circumstance.delays is None else delay_collectives(circumstance.delays, run.groups.world.rank)
    try:
        return _train(run, steps)
    finally:
        build.OrderedSums = real
        if end is not None:
            end()


def _train(run: Run, steps: int) -> list[Seen]:
    reader, consumed, seen = run.reader(run.splits.train), 0, []
    for iteration in range(1, steps + 1):
        step = run.step.run(reader, iteration, consumed)
        consumed = step.consumed_samples
        numbers = {**step.losses, "norm": step.grad_norm, "tokens": float(step.num_tokens)}
        digests = run.step.optimizer.state_digests() | {"data": sum_integers(run.groups.dp, reader.take_digest())}
        bias = [r.expert_bias_E.sum() for chunk in run.chunks for r in chunk.balanced_routers()]
        numbers |= {f"bias {i}": float(value) for i, value in enumerate(bias) if run.groups.pp.size == 1}
        seen.append(
            Seen(
                numbers={name: value.hex() for name, value in numbers.items()},
                state={name: digest_hex(total) for name, total in digests.items()},
            )
        )
    losses = run.step.evaluate(run.reader(run.splits.train), 1, steps, 0)
    return [*seen, Seen(numbers={name: value.hex() for name, value in losses.items()}, state={})]


def trajectories(commands: Sequence[tuple[str, str]], steps: int) -> list[list[Seen]]:
    """Rank function: one trajectory after the other, to start the ranks once. A command is the recipe that all flags
    start with, and the others."""
    return [trajectory(flags, steps, base=base) for base, flags in commands]


def under_circumstances(flags: str, steps: int, circumstances: Sequence[Circumstance]) -> list[list[Seen]]:
    """Rank function: the same command under each circumstance."""
    return [trajectory(flags, steps, circumstance) for circumstance in circumstances]
