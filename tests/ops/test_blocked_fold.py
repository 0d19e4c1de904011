"""What the fold promises beyond the conformance tests: slots may be tensors of their own, and the sum has a place."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.availability import installed
from megatron.core.ops.blocked_fold import OP
from megatron.core.ops.blocked_fold.reference import blocked_fold
from tests.ops.calls import interpreted

INTERPRETED = """
import torch
from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold import OP
fast, plain = OP.variant("deterministic_triton").fn, OP.variants[-1].fn
for dtype in (torch.float32, torch.bfloat16):
    for case in OP.spec.cases(torch.Generator().manual_seed(1), dtype, torch.device("cpu")):
        slots, block = case.args
        out = torch.empty(slots.shape[1])
        apart = [slot.clone() for slot in slots]
        same = same_bits(fast(slots, block), plain(slots, block)) and same_bits(fast(apart, block), plain(slots, block))
        same = same and same_bits(fast(apart, block, out), plain(slots, block))
        print(case.name, "same" if same else "DIFFERENT")
"""


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_the_kernel_agrees_where_it_is_interpreted():
    lines = interpreted(INTERPRETED)
    assert len(lines) == 14
    assert [line for line in lines if not line.endswith(" same")] == []


def _slots(dtype: torch.dtype) -> torch.Tensor:
    """Terms of such different sizes that the order of additions shows."""
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(5, 700, generator=generator) * torch.randn(5, 700, generator=generator).mul(9).exp()).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_kernel_rounds_once_into_the_place_of_the_sum(dtype: torch.dtype):
    slots = _slots(dtype)
    apart = [slot.cuda() for slot in slots]
    fast = OP.variant("deterministic_triton").fn
    assert same_bits(fast(apart, 2).cpu(), blocked_fold(slots, 2))
    assert same_bits(fast(apart, 2, apart[3]).cpu(), blocked_fold(slots, 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_may_be_tensors_and_the_sum_may_take_the_place_of_one(dtype: torch.dtype):
    slots = _slots(dtype)
    want = blocked_fold(slots, 2)
    apart = [slot.clone() for slot in slots]
    assert same_bits(blocked_fold(apart, 2), want)
    assert same_bits(blocked_fold(apart, 2, apart[3]), want.to(dtype))
    assert same_bits(apart[3], want.to(dtype))
    assert not same_bits(blocked_fold(slots, 5), want), "the control: another block is another sum"
