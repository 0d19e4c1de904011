"""The reproducible norm: exact for any cut, order and number of pieces, correctly rounded, honest about inf and NaN."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.norm_blocks.limbs import BLOCK, LIMBS, SIZE, UNIT_EXPONENT, norm_from_limbs
from megatron.core.ops.norm_blocks.reference import block_sums, norm_blocks


def _spread(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    power = torch.randint(-40, 38, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 10.0**power


def _exact(flat: torch.Tensor) -> Fraction:
    return sum((Fraction(s) for s in block_sums(flat).tolist()), Fraction(0))


def _value(limbs: torch.Tensor) -> Fraction:
    total = sum(limb << (32 * i) for i, limb in enumerate(limbs.tolist()[:LIMBS]))
    return Fraction(total) * Fraction(2) ** UNIT_EXPONENT


@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 50 * BLOCK + 77])
def test_the_accumulator_is_the_exact_sum_of_block_sums(numel):
    flat = _spread(numel)
    assert _value(norm_blocks(flat)) == _exact(flat)


def test_a_block_sum_is_added_by_halving():
    values = [float(v) ** 2 for v in _spread(BLOCK)]
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    assert block_sums(_spread(BLOCK)).tolist() == values


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 33, 257])
def test_a_block_does_not_see_its_neighbours(blocks):
    flat = _spread(blocks * BLOCK)
    single = torch.cat([block_sums(piece) for piece in flat.split(BLOCK)])
    assert same_bits(block_sums(flat), single)


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 7])
def test_any_cut_at_blocks_in_any_order_gives_the_same_norm(pieces):
    flat = _spread(51 * BLOCK - 947)
    edges = [i * 51 // pieces * BLOCK for i in range(pieces)] + [flat.numel()]
    parts = [norm_blocks(flat[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    order = torch.randperm(pieces).tolist()
    total = torch.stack([parts[i] for i in order]).sum(dim=0)
    assert torch.equal(total, norm_blocks(flat))
    assert norm_from_limbs(total.tolist()) == norm_from_limbs(norm_blocks(flat).tolist())


def test_fp64_sums_of_pieces_would_depend_on_the_cut():
    """Control: the data is hard enough that ordinary addition of the pieces' sums is caught."""
    flat = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(6)) * 1e3
    forward = math.fsum([0.0])
    for value in block_sums(flat).tolist():
        forward += value
    backward = 0.0
    for value in reversed(block_sums(flat).tolist()):
        backward += value
    assert forward != backward


def test_the_norm_is_correctly_rounded():
    for seed in range(20):
        flat = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        norm, exact = norm_from_limbs(norm_blocks(flat).tolist()), _exact(flat)
        assert norm == pytest.approx(float(flat.double().norm()), rel=1e-14)
        below, above = Fraction(math.nextafter(norm, 0.0)), Fraction(math.nextafter(norm, math.inf))
        assert ((below + Fraction(norm)) / 2) ** 2 <= exact <= ((above + Fraction(norm)) / 2) ** 2


def test_the_ends_of_fp32_fit():
    largest = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    assert norm_from_limbs(norm_blocks(largest).tolist()) == pytest.approx(32.0 * torch.finfo(torch.float32).max)
    assert _value(norm_blocks(largest)) == _exact(largest)
    smallest = torch.tensor([1e-45])
    assert norm_from_limbs(norm_blocks(smallest).tolist()) == 2.0**-149
    assert norm_from_limbs(norm_blocks(torch.zeros(5)).tolist()) == 0.0


def test_2_to_the_30_blocks_leave_room_in_every_limb():
    """The middle limb gets most of one block: a carry below 2^31 and a word below 2^32."""
    assert (1 << 30) * ((1 << 31) + (1 << 32)) < 1 << 63


def test_many_equal_blocks_carry_exactly():
    limbs = norm_blocks(torch.full((BLOCK,), 1.1))
    count = 1 << 30
    total = [limb * count for limb in limbs.tolist()]
    assert all(abs(limb) < 1 << 63 for limb in total)
    assert norm_from_limbs(total) == pytest.approx(math.sqrt(count * BLOCK) * float(torch.tensor(1.1)), rel=1e-14)


def test_infinity_and_nan_win():
    flat = torch.ones(3 * BLOCK)
    flat[BLOCK] = math.inf
    assert norm_from_limbs(norm_blocks(flat).tolist()) == math.inf
    flat[2 * BLOCK] = math.nan
    assert math.isnan(norm_from_limbs(norm_blocks(flat).tolist()))
    with pytest.raises(ValueError, match="limbs"):
        norm_from_limbs([0] * (SIZE - 1))
    with pytest.raises(ValueError, match="norm_blocks of"):
        norm_blocks(torch.ones(2, 2))


def test_more_blocks_than_are_spread_at_once(monkeypatch):
    flat = _spread(9 * BLOCK + 5)
    whole = norm_blocks(flat)
    monkeypatch.setitem(norm_blocks.__globals__, "_AT_ONCE", 2)
    assert torch.equal(norm_blocks(flat), whole)
