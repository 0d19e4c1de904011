"""From the sum over logical shards to the final gradient, and the experts' bias; once per step, after the last pass.

The order of additions, the same on every physical layout: the fold over tensor-parallel ranks where copies hold partial
gradients, first-stage buffer plus last-stage buffer for a parameter of both, one multiplication by 1 / LDP, or by 1 /
unmasked tokens of the step, rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.core.contracts.stage import BalancedRouter
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.process_groups.collectives import exchange, sum_integers
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.ordered_reduce import FloatSums


def _add_other_stage(groups: ProcessGroups, mine: torch.Tensor) -> torch.Tensor:
    """First-stage part + last-stage part, on both stages."""
    ends = groups.embedding
    if ends is None:
        raise ValueError("a parameter of first and last stage is held by a stage between them")
    theirs = torch.empty_like(mine)
    exchange(ends, [(1 - ends.rank, mine)], [(1 - ends.rank, theirs)])
    first, last = (mine, theirs) if ends.is_first else (theirs, mine)
    return first + last


def is_final(buffer: ParamAndGradBuffer, groups: ProcessGroups, divisor: int) -> bool:
    """Whether a buffer's sums over logical shards are the final gradient already."""
    key = buffer.plan.key
    return divisor == 1 and not key.two_stage and not (key.tp_partial and groups.tp.size > 1)


def finish_gradients(
    buffers: Sequence[ParamAndGradBuffer], groups: ProcessGroups, sums: FloatSums, divisor: int
) -> None:
    """From the sums over logical shards, which lie in the owned spans of every gradient buffer, to the final gradient
    (unclipped) in the owned spans of the first; ``divisor`` is the number of logical shards or of tokens."""
    for buffer in buffers:
        if is_final(buffer, groups, divisor):
            continue
        for bucket in range(len(buffer.plan.buckets)):
            parts = [buffer.own_part(leaf, bucket) for leaf in range(len(buffer.grads))]
            own = parts[0]
            if buffer.plan.key.tp_partial:
                parts = [sums.all_reduce(groups.tp, part) for part in parts]
            total = parts[0]
            if len(parts) == 2:
                total = parts[0] + parts[1]
            elif buffer.plan.key.two_stage:
                total = _add_other_stage(groups, total)
            # A Python float meets an fp32 tensor as its value rounded to fp32.
            torch.mul(total, 1.0 / divisor, out=own)


def update_expert_bias(routers: Iterable[BalancedRouter], groups: ProcessGroups) -> None:
    """Move every router's expert bias by ``rate * sign(mean count - count)`` and zero the counts.

    Counts are summed as integers over all ranks of the stage, and ``E * count`` is compared with their total as
    integers, so the bias is a function of the routing alone. Once per step, also where the step is skipped later.
    """
    routers = list(routers)
    if not routers:
        return
    counts = sum_integers(groups.tp_dp, torch.cat([router.token_counts_E for router in routers]))
    for router, count in zip(routers, counts.split([r.token_counts_E.numel() for r in routers]), strict=True):
        direction = torch.sign(count.sum() - count.numel() * count)
        router.expert_bias_E.add_(direction.to(torch.float32) * router.bias_update_rate)
        router.token_counts_E.zero_()
