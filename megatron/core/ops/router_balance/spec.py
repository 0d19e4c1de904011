"""Contract of ``router_balance``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, OpSpec
from megatron.core.ops.samples import Samples, tolerances


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Both kinds of scores, one and several sequences and sets of them, one and all experts, ties, rows of a wider
    matrix and of columns, more blocks of tokens than slots that add them, one token, none."""
    draw = Samples(generator, dtype, device)
    out = []
    for tokens, experts, k, sequences in (
        (33, 12, 5, (3,)),
        (33, 12, 5, (1,)),
        (66, 9, 2, (1, 6, 1)),
        (7, 1, 1, (7,)),
        (40, 512, 22, (2,)),
        (1, 130, 6, (1,)),
        (0, 8, 2, (3, 1)),
    ):
        for softmax in (False, True):
            score = draw.normal(tokens, experts, fp32=True) if softmax else draw.uniform(tokens, experts, fp32=True)
            name = f"{tokens}x{experts}-k{k}-{sequences}-{'softmax' if softmax else 'sum'}"
            out.append(Case(name=name, args=(score, k, sequences, softmax), grads=(0,)))
    out.append(Case(name="blocks", args=(draw.uniform(1050, 65, fp32=True), 1, (1,), False), grads=(0,)))
    ties = draw.integers(64, 16, low=1, high=4).to(torch.float32)
    out.append(Case(name="ties", args=(ties, 6, (2,), False), grads=(0,)))
    out.append(Case(name="equal", args=(torch.ones(5, 9, device=device), 4, (1,), True), grads=(0,)))
    out.append(Case(name="wider", args=(draw.uniform(24, 40, fp32=True)[:, 3:34], 4, (2,), False), grads=(0,)))
    out.append(Case(name="columns", args=(draw.normal(11, 34, fp32=True).t(), 3, (1,), True), grads=(0,)))
    return out


SPEC = OpSpec(
    name="router_balance",
    promise="router_balance(score_TE fp32, k, sequences, softmax) -> p_BE fp32, count_BE int64: normalised scores, and "
    "which are among a token's k largest, summed over the tokens of each sequence, for each number of sequences.",
    order="A token's scores in an order fixed by E; a sequence's tokens in one fixed by their number; ties go to the "
    "lowest id.",
    cases=cases,
    tolerance=tolerances(1e-5, 1e-5, "sums of up to 1,050 normalised scores, each of up to 512 scores, in fp32"),
)
