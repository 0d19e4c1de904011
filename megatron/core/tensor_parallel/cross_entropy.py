"""Cross entropy over logits whose vocabulary is cut over the tensor-parallel ranks.

Each rank reduces its own columns to three numbers per token; those are gathered and combined on every rank in rank
order, so all ranks hold the same loss, bit for bit. Columns behind the true vocabulary are left out of the sum and
get no gradient, so the padding, which depends on the tensor-parallel size, does not enter the loss.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.process_groups.collectives import all_gather
from megatron.core.tensor_parallel.context import ModelContext


def _log_z(max_RT: torch.Tensor, sum_exp_RT: torch.Tensor, context: ModelContext) -> torch.Tensor:
    """Logarithm of the softmax denominator per token from every rank's maximum and sum; a rank that has only padding
    brings a maximum of -inf and a sum of zero."""
    highest_T = max_RT.amax(dim=0)
    scaled_RT = sum_exp_RT * torch.exp(max_RT - highest_T)
    return highest_T + torch.log(context.ops["blocked_fold"](scaled_RT, scaled_RT.shape[0]))


class _VocabParallelCrossEntropy(Node):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, num_valid: int, context: ModelContext
    ) -> torch.Tensor:
        stats = context.ops["cross_entropy_stats"](logits_TV, target_T, num_valid)
        max_RT, sum_exp_RT, target_RT = all_gather(context.groups.tp, torch.stack(stats)).unbind(1)
        log_z_T = _log_z(max_RT, sum_exp_RT, context)
        ctx.save_for_backward(logits_TV, target_T, log_z_T)
        ctx.num_valid, ctx.grad_op = num_valid, context.ops["cross_entropy_grad"]
        # The target's logit lies on one rank and is zero on the others: this sum is exact.
        return log_z_T - context.ops["blocked_fold"](target_RT, target_RT.shape[0])

    @staticmethod
    def backward(ctx: Any, dloss_T: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_TV, target_T, log_z_T = ctx.saved_tensors
        return ctx.grad_op(logits_TV, target_T, ctx.num_valid, log_z_T, dloss_T.contiguous()), None, None, None


def vocab_parallel_cross_entropy(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab_size: int, context: ModelContext
) -> torch.Tensor:
    """fp32 loss per token, equal on all tensor-parallel ranks.

    ``logits_TV`` holds this rank's columns of the padded vocabulary, ``labels_T`` (int64) global ids below
    ``vocab_size``, the number of real entries.
    """
    columns = logits_TV.shape[1]
    first = columns * context.groups.tp.rank
    num_valid = min(max(vocab_size - first, 0), columns)
    here_T = (labels_T >= first) & (labels_T < first + num_valid)
    target_T = torch.where(here_T, labels_T - first, -1)
    return _VocabParallelCrossEntropy.apply(logits_TV, target_T, num_valid, context)
