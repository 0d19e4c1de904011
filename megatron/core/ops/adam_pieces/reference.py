"""The definition of ``adam_pieces``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.core.ops.adam_pieces.adamw import adamw
from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.digest_pieces.definition import words_of
from megatron.core.ops.digest_pieces.reference import digest_pieces
from megatron.core.ops.registry import Guarantee, Variant

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Flat fp32 masters, first and second moments."""


def adam_pieces(
    plan: UpdatePlan,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    *,
    scalars: AdamScalars,
    digest: bool,
    digest_grad: bool = False,
) -> torch.Tensor:
    """AdamW on every run of the plan, then ``weights`` = masters, rounded once.

    Returns the digests of the plan's pieces of masters, moments and weights, int64 ``[4, P, 2]``, with ``digest_grad``
    also of ``grad`` as it was given, ``[5, P, 2]``; without ``digest`` ``[0, P, 2]``.
    """
    state = param, exp_avg, exp_avg_sq
    return step_by_runs(adamw, plan, state, grad, weights, scalars=scalars, digest=digest, digest_grad=digest_grad)


def step_by_runs(
    step: Callable[..., None],
    plan: UpdatePlan,
    state: State,
    grad: torch.Tensor,
    weights: torch.Tensor,
    *,
    scalars: AdamScalars,
    digest: bool,
    digest_grad: bool,
) -> torch.Tensor:
    """The same with another ``step`` for a run."""
    plain = replace(scalars, weight_decay=0.0)
    for run in plan.runs:
        param, exp_avg, exp_avg_sq = (flat[run.state : run.state + run.length] for flat in state)
        here = slice(run.buffer, run.buffer + run.length)
        step(param, grad[here], exp_avg, exp_avg_sq, scalars if run.decays else plain)
        weights[here].copy_(param)
    if not digest:
        return torch.zeros(0, len(plan.table), 2, dtype=torch.int64, device=grad.device)
    of_state = digest_pieces(plan.table, *(words_of(flat) for flat in state))
    found = [of_state, digest_pieces(plan.in_buffer, words_of(weights))]
    if digest_grad:
        found.append(digest_pieces(plan.in_buffer, words_of(grad)))
    return torch.cat(found)


VARIANT = Variant(
    name="reference",
    fn=adam_pieces,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other; digests are wrapping sums of integers.",
    sources=(
        "megatron.core.ops.adam_pieces.adamw",
        "megatron.core.ops.adam_pieces.plan",
        "megatron.core.ops.adam_pieces.scalars",
        "megatron.core.ops.digest_pieces.definition",
        "megatron.core.ops.digest_pieces.reference",
    ),
)
