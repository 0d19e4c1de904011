"""``adam_pieces`` run by run, each in parts that stay in the cache."""

from __future__ import annotations

import torch

from megatron.core.ops.adam_pieces.adamw import adamw_in_parts
from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.adam_pieces.reference import step_by_runs
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.registry import Guarantee, Variant


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
    """See the reference; the bits are the same because every operation is elementwise."""
    state = param, exp_avg, exp_avg_sq
    return step_by_runs(
        adamw_in_parts, plan, state, grad, weights, scalars=scalars, digest=digest, digest_grad=digest_grad
    )


VARIANT = Variant(
    name="deterministic",
    fn=adam_pieces,
    guarantee={"cpu": Guarantee.LAYOUT, "cuda": Guarantee.LAYOUT},
    why="Elementwise, one rounded operation after the other; digests are wrapping sums of integers.",
    sources=(
        "megatron.core.ops.adam_pieces.adamw",
        "megatron.core.ops.adam_pieces.plan",
        "megatron.core.ops.adam_pieces.reference",
        "megatron.core.ops.adam_pieces.scalars",
    ),
)
