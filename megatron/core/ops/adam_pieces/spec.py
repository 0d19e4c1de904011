"""Contract of ``adam_pieces``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.digest_pieces.table import TILE, PieceAt
from megatron.core.ops.registry import Case, Cut, Guarantee, OpSpec
from megatron.core.ops.samples import Samples, tolerances

SCALARS = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7, clip_factor=0.37)
PIECES = (
    PieceAt(name="a", shard=0, start=0, length=1025, offset=0),
    PieceAt(name="a", shard=1, start=3 << 33, length=0, offset=2048),
    PieceAt(name="b.weight", shard=7, start=1024, length=TILE + 77, offset=2048),
    PieceAt(name="c", shard=0, start=5, length=1, offset=TILE + 4096),
)
ALIGNED = tuple(replace(piece, length=piece.length + -piece.length % 4) for piece in PIECES)
DECAYS = (True, True, False, True)
WRITES = (1, 2, 3, 5)


def operands(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    plan: UpdatePlan,
    sizes: tuple[int, int],
    scale: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Masters and moments of ``sizes[0]`` elements, gradients and weights (of ``dtype``) of ``sizes[1]``; gradients
    and moments are about ``scale``."""
    draw = Samples(generator, torch.float32, device)
    state, buffer = sizes
    moments = draw.normal(state, scale=scale), draw.uniform(state).square() * (scale * scale)
    values, grad = (draw.normal(state), *moments), draw.normal(buffer, scale=scale)
    _without_padding(plan, values, grad)
    return (*values, grad, torch.zeros(buffer, dtype=dtype, device=device))


def cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Gaps, short and empty pieces, more than a tile, with and without decay, of any length and of multiples of four;
    nothing at all; first and late steps, tiny and huge gradients."""
    plan, aligned = (UpdatePlan(pieces, [piece.offset for piece in pieces], DECAYS) for pieces in (PIECES, ALIGNED))
    whole, short = TILE + 4097, 513
    one = UpdatePlan([PieceAt(name="a", shard=0, start=0, length=short, offset=0)], [0], [True])
    out = []
    for name, which, size, changes, scale in (
        ("pieces", plan, whole, {}, 1.0),
        ("aligned", aligned, whole + 3, {}, 1.0),
        ("empty", UpdatePlan([], [], []), 0, {}, 1.0),
        ("late", one, short, {"step": 100_000}, 1.0),
        ("tiny", one, short, {"step": 2, "clip_factor": 1.0}, 1e-25),
        ("huge", one, short, {"step": 2, "clip_factor": 1e-3}, 1e15),
    ):
        args = (which, *operands(generator, dtype, device, which, (size, size), scale))
        kwargs = {"scalars": replace(SCALARS, **changes), "digest": False}
        out.append(Case(name=name, args=args, kwargs=kwargs, writes=WRITES))
    first = (one, *operands(generator, dtype, device, one, (short, short)))
    for moment in first[2:4]:
        moment.zero_()
    kwargs = {"scalars": replace(SCALARS, step=1), "digest": False}
    return [*out, Case(name="first", args=first, kwargs=kwargs, writes=WRITES)]


def _without_padding(plan: UpdatePlan, state: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
    """State and gradients are zero between pieces, as in a buffer."""
    offsets_of_state = [piece.offset for piece in plan.table.pieces]
    for flat, offsets in ((grad, plan.buffer), *((flat, offsets_of_state) for flat in state)):
        inside = torch.zeros_like(flat, dtype=torch.bool)
        for piece, at in zip(plan.table.pieces, offsets, strict=True):
            inside[at : at + piece.length] = True
        flat.masked_fill_(~inside, 0.0)


def _cut(args: list, start: int, stop: int) -> list:
    """The parts of the pieces in elements ``start ... stop``, state and buffer at the same offsets."""
    plan = args[0]
    parts, decays = [], []
    for piece, decay in zip(plan.table.pieces, plan.decays, strict=True):
        begin = min(max(piece.offset, start), stop)
        end = max(begin, min(piece.offset + piece.length, stop))
        at = piece.start + max(0, begin - piece.offset)
        parts.append(PieceAt(name=piece.name, shard=piece.shard, start=at, length=end - begin, offset=begin - start))
        decays.append(decay)
    return [UpdatePlan(parts, [part.offset for part in parts], decays), *args[1:]]


SPEC = OpSpec(
    name="adam_pieces",
    promise="adam_pieces(plan, param, exp_avg, exp_avg_sq, grad, weights, *, scalars, digest, digest_grad=False): "
    "AdamW by piece, weights = masters rounded once; -> the pieces' digests (digest_pieces/definition.py), if asked: "
    "int64 [4, P, 2], or [5, P, 2] with those of the gradient as it was given.",
    order="Elementwise: separate fp32 products and sums, no fused multiply-add; digests are wrapping integer sums.",
    cases=cases,
    tolerance=tolerances(2e-6, 1e-2, "a dozen fp32 operations; weights are rounded to the activation type"),
    cuts=(
        Cut(
            name="elements",
            level=Guarantee.LAYOUT,
            args=dict.fromkeys(range(1, 6), 0),
            outs=(None, 0, 0, 0, 0),
            adjust=_cut,
        ),
    ),
)
