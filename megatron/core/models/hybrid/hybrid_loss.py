"""From token losses to the scalar a step differentiates.

A mean over one micro-batch's unmasked tokens has the weight 1 / number of micro-batches. Where a step's gradient is
divided by all its tokens at the end (--calculate-per-token-loss), the weight is the number of those tokens, so that the
means add up to one over all tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron.core.contracts.batch import Batch, Microbatch


def masked_sum(token_loss_SB: torch.Tensor, loss_mask_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 sum of unmasked token losses, their number int64).

    The sum is torch's fp32 sum over a micro-batch's tokens, whose order depends on their number and the device alone.
    """
    mask_SB = loss_mask_BS.t()
    return (token_loss_SB * mask_SB).sum(), mask_SB.to(torch.int64).sum()


def mean_of(loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Mean over unmasked tokens, fp32; 0 where every token is masked."""
    return loss_sum / num_tokens.clamp(min=1).to(torch.float32)


def with_weight(microbatch: Microbatch, batch: Batch, per_token: bool) -> Microbatch:
    """The micro-batch with the weight its means have. With ``per_token`` that is the number of its unmasked tokens, the
    same on every stage, whatever the stage's layers."""
    if not per_token:
        return microbatch
    num_tokens = batch.loss_mask_BS.to(torch.int64).sum()
    return dataclasses.replace(microbatch, loss_weight=num_tokens.to(torch.float32))


def _shifted(x_BS: torch.Tensor, by: int) -> torch.Tensor:
    out_BS = torch.zeros_like(x_BS)
    out_BS[:, : max(0, x_BS.shape[1] - by)] = x_BS[:, by:]
    return out_BS


def ahead(batch: Batch, depth: int) -> Batch:
    """The batch as depth ``depth`` (from 1) sees it: tokens, labels and mask moved that many places towards the start;
    vacated places hold token 0 and are masked."""
    return Batch(
        tokens_BS=_shifted(batch.tokens_BS, depth),
        labels_BS=_shifted(batch.labels_BS, depth),
        loss_mask_BS=_shifted(batch.loss_mask_BS, depth),
        position_ids_BS=batch.position_ids_BS,
    )
