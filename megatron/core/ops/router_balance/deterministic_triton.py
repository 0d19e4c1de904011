"""``router_balance`` in two launches forward and one backward; normalised scores are never written."""

from __future__ import annotations

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.router_balance.kernels.router_balance import (
    router_balance_bwd_kernel,
    router_balance_fwd_kernel,
    router_balance_sum_kernel,
)


def _rule(experts: int) -> Config:
    """1,024 scores per program at least, in 8 to 64 rows."""
    return {"ROWS": min(64, max(8, 1024 // power_of_two(experts))), "num_warps": 4}


CHOICES = {"ROWS": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)}
FORWARD = Launch(kernel="router_balance_fwd", rule=_rule, choices=CHOICES, new_bits=frozenset(CHOICES))
BACKWARD = Launch(kernel="router_balance_bwd", rule=_rule, choices=CHOICES, new_bits=frozenset(CHOICES))
SUM = Launch(
    kernel="router_balance_sum",
    rule=lambda _: {"BLOCK_R": 64, "BLOCK_X": 32, "AT_ONCE": 2, "num_warps": 4},
    choices={"BLOCK_R": (32, 64, 128), "BLOCK_X": (16, 32, 64), "AT_ONCE": (1, 2, 4), "num_warps": (2, 4, 8)},
    new_bits=frozenset({"BLOCK_R", "BLOCK_X", "num_warps"}),
)
"""All by the number of experts; never by that of tokens or sequences."""


def _sums(score_TE: torch.Tensor, k: int, softmax: bool, p_BE: torch.Tensor, count_BE: torch.Tensor) -> None:
    """Sums and counts over the tokens of as many sequences as the results have rows."""
    sequences, experts = p_BE.shape
    launch, length = FORWARD.config(score_TE.device, experts), score_TE.shape[0] // sequences
    blocks = cdiv(length, launch["ROWS"])
    parts_R2BE = score_TE.new_empty(blocks, 2, sequences, experts)
    if blocks:
        run_kernel(
            router_balance_fwd_kernel, (blocks, sequences),
            score_TE, parts_R2BE, length, sequences, experts, score_TE.stride(0),
            K=k, SOFTMAX=softmax, BLOCK_E=power_of_two(experts), **launch,
        )  # fmt: skip
    columns, launch = sequences * experts, SUM.config(score_TE.device, experts)
    run_kernel(
        router_balance_sum_kernel, (cdiv(columns, launch["BLOCK_X"]),),
        parts_R2BE, p_BE, count_BE, blocks, columns, **launch,
    )  # fmt: skip


def _for_each_sequence(grad_BE: torch.Tensor, sequences: tuple[int, ...]) -> torch.Tensor:
    """The gradients of all sets of sequences as one of the largest set, the last set first."""
    most = max(sequences)
    last, *rest = [
        part_BE.repeat(most // n, 1) for part_BE, n in zip(grad_BE.split(sequences), sequences, strict=True)
    ][::-1]
    for part_BE in rest:
        last += part_BE
    return last


class _RouterBalance(Node):
    @staticmethod
    def forward(ctx, score_TE: torch.Tensor, k: int, sequences: tuple[int, ...], softmax: bool):
        ctx.save_for_backward(score_TE)
        ctx.sequences, ctx.softmax = sequences, softmax
        rows, experts = sum(sequences), score_TE.shape[1]
        p_BE = score_TE.new_empty(rows, experts)
        count_BE = score_TE.new_empty(rows, experts, dtype=torch.int64)
        ctx.mark_non_differentiable(count_BE)
        ctx.set_materialize_grads(False)
        if len(sequences) == 1:
            _sums(score_TE, k, softmax, p_BE, count_BE)
        else:
            for part_BE, counted_BE in zip(p_BE.split(sequences), count_BE.split(sequences), strict=True):
                _sums(score_TE, k, softmax, part_BE, counted_BE)
        return p_BE, count_BE

    @staticmethod
    def backward(ctx, grad_BE: torch.Tensor, _: None):
        (score_TE,) = ctx.saved_tensors
        tokens, experts = score_TE.shape
        dscore_TE = score_TE.new_empty(tokens, experts)
        if tokens:
            if len(ctx.sequences) > 1:
                grad_BE = _for_each_sequence(grad_BE, ctx.sequences)
            launch = BACKWARD.config(score_TE.device, experts)
            run_kernel(
                router_balance_bwd_kernel, (cdiv(tokens, launch["ROWS"]),),
                score_TE, grad_BE.contiguous(), dscore_TE, tokens, grad_BE.shape[0], experts, score_TE.stride(0),
                SOFTMAX=ctx.softmax, BLOCK_E=power_of_two(experts), **launch,
            )  # fmt: skip
        return dscore_TE, None, None, None


def router_balance(
    score_TE: torch.Tensor, k: int, sequences: tuple[int, ...], softmax: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference; rows of a wider matrix are read in place."""
    return _RouterBalance.apply(score_TE if score_TE.stride(1) == 1 else score_TE.contiguous(), k, sequences, softmax)


VARIANT = Variant(
    name="deterministic_triton",
    fn=router_balance,
    guarantee={"cuda": Guarantee.RUN_TO_RUN},
    why="Fixed trees inside rows and blocks of tokens, partial sums added in block order; counts are integers.",
    sources=(
        "megatron.core.ops.router_balance.kernels.router_balance",
        "megatron.core.ops.router_topk.kernels.router_topk",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
