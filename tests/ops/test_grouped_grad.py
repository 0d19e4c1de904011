"""Weight gradients of experts: rows of other experts stay out, whatever they hold, and empty experts stay untouched."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.grouped_gemm.spec import ends_of

(GROUPED_GRAD,) = (op for op in ALL_OPS if op.spec.name == "grouped_grad")
PLACES = [
    pytest.param(variant, device, id=f"{variant.name}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for variant in GROUPED_GRAD.variants
    for device in variant.guarantee
]


def _operands(counts: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    dy, x = (torch.randn(sum(counts), width, generator=generator).bfloat16() for width in (136, 264))
    main = torch.randn(len(counts), 136, 264, generator=generator)
    return main.to(device), dy.to(device), x.to(device)


@pytest.mark.parametrize(("variant", "device"), PLACES)
def test_rows_of_the_next_expert_do_not_leak_in(variant, device) -> None:
    """Counts that are no multiples of a block of rows; the neighbours hold NaN."""
    counts = (70, 1, 0, 129)
    ends = ends_of(counts, torch.device(device))
    main, dy, x = _operands(counts, device)
    want = main.clone()
    variant.fn(want, dy, x, ends)
    dy[70:71], x[70:71] = float("nan"), float("inf")
    got = main.clone()
    variant.fn(got, dy, x, ends)
    assert not got[1].isfinite().any()
    assert all(same_bits(got[e], want[e]) for e in (0, 2, 3))
    assert same_bits(got[2], main[2])


@pytest.mark.parametrize(("variant", "device"), PLACES)
def test_an_expert_alone_has_the_same_gradient(variant, device) -> None:
    counts = (70, 1, 0, 129)
    main, dy, x = _operands(counts, device)
    want = main.clone()
    variant.fn(want, dy, x, ends_of(counts, torch.device(device)))
    alone = main[3:].clone()
    variant.fn(alone, dy[71:], x[71:], ends_of((129,), torch.device(device)))
    torch.testing.assert_close(alone[0], want[3], rtol=2e-5, atol=2e-4)
