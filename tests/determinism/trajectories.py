"""Whole steps on the rank pool, and what of them must not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.digest.bits import digest_hex
from megatron.core.process_groups.collectives import sum_integers
from megatron.training.loop.build import Run
from tests.support.training import build_here

NOISY = "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1"
"""Every kind of noise that training draws."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step (or an evaluation, ``state`` empty): numbers as hex floats and layout-free digests."""

    numbers: dict[str, str]
    state: dict[str, str]


def trajectory(flags: str, steps: int, prepare: Callable[[Run], None] | None = None) -> list[Seen]:
    """Rank function: ``steps`` steps, then one evaluation. ``prepare`` may change the run before its first step."""
    run = build_here(flags)
    if prepare is not None:
        prepare(run)
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


def trajectories(all_flags: Sequence[str], steps: int) -> list[list[Seen]]:
    """Rank function: one trajectory after the other, to start the ranks once."""
    return [trajectory(flags, steps) for flags in all_flags]
