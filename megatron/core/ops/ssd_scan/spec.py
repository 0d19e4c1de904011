"""Contract of ``ssd_scan``."""

from __future__ import annotations

import torch

from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

SHAPES = (
    (2, 37, 4, 6, 2, 5, 16),
    (1, 16, 2, 8, 1, 4, 16),
    (1, 3, 3, 4, 3, 2, 8),
    (0, 9, 2, 4, 1, 3, 4),
    (2, 1, 2, 3, 2, 2, 1),
)
"""Batch, sequence, heads, head width, groups, state, chunk."""


def sample(
    draw: Samples, shape: tuple[int, ...], *, dt_shift: float = -2.0, A_high: float = 2.7
) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """Positional and named arguments; ``dt_shift`` moves the time steps, ``A_high`` is the largest A_log."""
    batch, length, heads, width, groups, state, chunk = shape
    args = (
        draw.normal(batch, length, heads, width),
        draw.normal(batch, length, heads),
        draw.uniform(heads, high=A_high, fp32=True),
        draw.normal(batch, length, groups, state),
        draw.normal(batch, length, groups, state),
        draw.normal(heads, shift=1.0, fp32=True),
    )
    return args, {"dt_bias_N": draw.normal(heads, shift=dt_shift, fp32=True), "chunk_size": chunk}


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Lengths that are no multiple of the chunk, one position, no samples, decays near 0 and 1, strided inputs; states
    before and behind, and sequences that begin first, last, between and nowhere."""
    draw = Samples(generator, dtype, device)
    everything: tuple[int | str, ...] = (0, 1, 2, 3, 4, 5, "dt_bias_N")
    out = []
    for shape in SHAPES:
        args, named = sample(draw, shape)
        out.append(Case(name="x".join(map(str, shape)), args=args, kwargs=named, grads=everything))
    for name, shift, high in (("forgets", 6.0, 5.0), ("remembers", -12.0, 0.1)):
        args, named = sample(draw, (1, 21, 2, 4, 1, 3, 8), dt_shift=shift, A_high=high)
        out.append(Case(name=name, args=args, kwargs=named, grads=everything))
    for name, shape, begins, stateful in (
        ("states", (2, 37, 4, 6, 2, 5, 16), None, True),
        ("no-positions", (2, 0, 4, 6, 2, 5, 16), None, True),
        ("sequences", (4, 41, 4, 6, 2, 5, 16), ((0,), (7, 16, 40), (), (0, 1, 15, 31, 32)), False),
        ("sequences-and-states", (3, 37, 2, 6, 1, 5, 16), ((0, 20), (), (36,)), True),
        ("small", (1, 20, 1, 3, 1, 2, 16), ((5,),), True),
    ):
        args, named = sample(draw, shape)
        batch, length, heads, width, _, num_state, _ = shape
        if begins is not None:
            named["first_BS"] = first_BS = torch.zeros(batch, length, dtype=torch.bool, device=device)
            for first_S, places in zip(first_BS, begins, strict=True):
                first_S[list(places)] = True
        if stateful:
            named["state_BNDK"] = draw.normal(batch, heads, width, num_state, fp32=True)
        grads = (*everything, "state_BNDK") if stateful else everything
        out.append(Case(name=name, args=args, kwargs=named, grads=grads))
    args, named = sample(draw, (2, 19, 4, 4, 2, 3, 8))
    packed = draw.normal(2, 19, 16 + 6 + 6)
    x, b, c = (p.unflatten(-1, s) for p, s in zip(packed.split((16, 6, 6), -1), ((4, 4), (2, 3), (2, 3)), strict=True))
    out.append(Case(name="strided", args=(x, args[1], args[2], b, c, args[5]), kwargs=named, grads=everything))
    return out


SPEC = OpSpec(
    name="ssd_scan",
    promise="ssd_scan(x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, *, dt_bias_N, chunk_size, first_BS=None, "
    "state_BNDK=None) -> y_BSND, and the state behind the last position where the one before the first is given; with "
    "dt = softplus(dt + dt_bias): h = exp(-exp(A_log) dt) h + dt x B^T, y = h C + D x; "
    "head n reads group n // (N / G); where first is true, h before it counts as 0.",
    order="Inside chunks in an order fixed by variant and shapes; states pass from chunk to chunk, first to last.",
    cases=cases,
    tolerance=tolerances(1e-4, 2e-2, "fp32 sums over up to 37 positions; decays are exponentials of running sums"),
    cuts=(
        Cut(
            name="samples",
            level=Guarantee.BATCH,
            args={0: 0, 1: 0, 3: 0, 4: 0, "first_BS": 0, "state_BNDK": 0},
            outs=(0, 0),
        ),
    ),
)
