"""One step of many pieces: state and buffer at their own offsets, digests of what was written, compiled or not."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.adam_pieces.adamw import adamw
from megatron.core.ops.adam_pieces.plan import UpdatePlan, UpdateRun
from megatron.core.ops.adam_pieces.reference import adam_pieces
from megatron.core.ops.adam_pieces.spec import ALIGNED, DECAYS, PIECES, SCALARS, operands
from megatron.core.ops.availability import installed
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.digest_pieces.definition import words_of
from megatron.core.ops.digest_pieces.reference import digest_pieces
from megatron.core.ops.digest_pieces.table import TILE, PieceAt
from tests.ops.calls import interpreted

(ADAM_PIECES,) = (op for op in ALL_OPS if op.spec.name == "adam_pieces")
SHIFTED = UpdatePlan(PIECES, [piece.offset + 3 * i + 1 for i, piece in enumerate(PIECES)], DECAYS)
SIZES = (TILE + 4100, TILE + 4113)
PLANS = {"shifted": SHIFTED, "aligned": UpdatePlan(ALIGNED, [piece.offset for piece in ALIGNED], DECAYS)}
PLACES = [
    pytest.param(variant.fn, device, id=f"{variant.name}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for variant in ADAM_PIECES.variants
    for device in variant.guarantee
]


def _operands(dtype: torch.dtype, device: str, plan: UpdatePlan) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(t.to(device) for t in operands(generator, dtype, torch.device("cpu"), plan, SIZES))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, 1e-2, 1e-6) if a.dtype == torch.bfloat16 else torch.allclose(a, b, 1e-6, 1e-6)


def agrees(fn, dtype: torch.dtype, device: str, plan: UpdatePlan) -> str:
    """What is wrong with a step of ``fn``: values further from the reference's than roots may
    be, or digests that are not those of what it wrote and of the gradient it was given. Nothing if all is well."""
    want, got, again = (_operands(dtype, device, plan) for _ in range(3))
    adam_pieces(plan, *want, scalars=SCALARS, digest=False)
    digests = fn(plan, *got, scalars=SCALARS, digest=True, digest_grad=True)
    fewer = fn(plan, *again, scalars=SCALARS, digest=True)
    wrong = [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if not _close(a, b)]
    of_state = digest_pieces(plan.table, *(words_of(flat) for flat in got[:3]))
    in_buffer = [digest_pieces(plan.in_buffer, words_of(flat)) for flat in (got[4], want[3])]
    same = torch.equal(digests, torch.cat((of_state, *in_buffer))) and torch.equal(digests[:4], fewer)
    rounded = all(
        same_bits(got[4][at : at + p.length], got[0][p.offset : p.offset + p.length].to(dtype))
        for p, at in zip(plan.table.pieces, plan.buffer, strict=True)
    )
    return f"{wrong or ''}{'' if same else ' digests'}{'' if rounded else ' weights'}"


@pytest.mark.parametrize(("fn", "device"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_values_and_digests(fn, device, dtype, plan) -> None:
    assert agrees(fn, dtype, device, PLANS[plan]) == ""


INTERPRETED = """
import torch
from tests.ops.test_adam_pieces import ADAM_PIECES, PLANS, agrees
# The interpreter's own cast to bf16 does not round to nearest.
for name, plan in PLANS.items():
    print(name, agrees(ADAM_PIECES.variant("deterministic_triton").fn, torch.float32, "cpu", plan))
"""


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_the_kernel_agrees_where_it_is_interpreted() -> None:
    assert interpreted(INTERPRETED) == ["shifted ", "aligned "]


def test_digests_are_those_of_what_was_written_and_of_the_gradient_before_it_is_clipped() -> None:
    values = _operands(torch.bfloat16, "cpu", SHIFTED)
    found = adam_pieces(SHIFTED, *values, scalars=SCALARS, digest=True, digest_grad=True)
    assert torch.equal(found[:3], digest_pieces(SHIFTED.table, *(words_of(flat) for flat in values[:3])))
    assert torch.equal(found[3:4], digest_pieces(SHIFTED.in_buffer, words_of(values[4])))
    assert SCALARS.clip_factor != 1.0
    assert torch.equal(
        found[4:], digest_pieces(SHIFTED.in_buffer, words_of(_operands(torch.bfloat16, "cpu", SHIFTED)[3]))
    )
    for asked in (False, True):
        none = adam_pieces(SHIFTED, *values, scalars=SCALARS, digest=False, digest_grad=asked)
        assert none.shape == (0, len(PIECES), 2)


def test_a_piece_is_stepped_as_if_it_were_alone() -> None:
    values, alone = (_operands(torch.float32, "cpu", SHIFTED) for _ in range(2))
    adam_pieces(SHIFTED, *values, scalars=SCALARS, digest=False)
    piece, at = PIECES[0], SHIFTED.buffer[0]
    cut = [flat[piece.offset : piece.offset + piece.length] for flat in alone[:3]]
    adamw(cut[0], alone[3][at : at + piece.length], cut[1], cut[2], SCALARS)
    assert same_bits(cut[0], values[0][: piece.length])
    assert same_bits(values[4][at : at + piece.length], cut[0])


def test_runs_join_neighbours_that_lie_alike_and_decay_alike() -> None:
    pieces = [
        PieceAt(name=n, shard=0, start=0, length=10, offset=at) for n, at in zip("abcd", (0, 16, 32, 48), strict=True)
    ]
    plan = UpdatePlan(pieces, (100, 116, 140, 156), (True, True, True, False))
    assert plan.runs == (
        UpdateRun(state=0, buffer=100, length=26, decays=True),
        UpdateRun(state=32, buffer=140, length=10, decays=True),
        UpdateRun(state=48, buffer=156, length=10, decays=False),
    )
    assert plan.alignment == 2, "of lengths too: a kernel masks as many elements at once"
    assert [plan.alignment % 4 for plan in PLANS.values()] == [1, 0]
